"""Puts packed linear layers and embeddings into a model that cbgen has loaded itself, and back.

A packed module keeps the module that it stands for, without its weight, so that everything can be
put back. What is swapped is recognized exactly: an `nn.Linear` or a `Conv1D` of transformers, no
subclass, on the CPU, without hooks; the input embedding where it is plain or only scales.
Everything else is left alone. Layers that read one input (q/k/v, gate/up) become one product.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cbgen.engine.cpu.native import FORMATS, Kernels
from cbgen.engine.cpu.packed import (
    PackedWeight,
    WeightMemory,
    check_packed,
    first_columns,
    give_back,
)

_FUSED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that are called in this order with one input, if the module has them all."""

_LINEARS = (nn.Linear, Conv1D)
_SCALED_EMBEDDING = "ScaledWordEmbedding"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MARKER = "cbgen_marker"
"""An empty parameter: transformers reads dtype and device of a model from its first one, and some
models have none but packed ones."""

_CHECKED_IDS = 32


class PackedModule(nn.Module):
    """Stands for a module whose weight is packed."""

    def __init__(self, packed: PackedWeight, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        # In a list, so that it is no part of the model.
        self._originals = [original]
        shape = original.get_parameter("weight").shape
        nothing = torch.full((1, 1), float("nan"), dtype=dtype).expand(shape)
        original.weight = nn.Parameter(nothing, requires_grad=False)

    @property
    def original(self) -> nn.Module:
        """The module that this one stands for, without its weight."""
        return self._originals[0]

    @property
    def weight(self) -> torch.Tensor:
        """Shape, dtype and device of the weight, which models ask for; its values are NaN."""
        return self.original.get_parameter("weight")


class PackedLinear(PackedModule):
    """Stands for an `nn.Linear` or a `Conv1D`."""

    def __init__(self, packed: PackedWeight, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(packed, original, dtype)
        bias = original._parameters.get("bias")
        self.bias = None if bias is None else bias.detach().float().contiguous()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., columns] of [..., depth]."""
        return self.packed.multiply(rows, self.bias)


class FusedProduct:
    """Several linear layers of one input as one product, computed when the first of them is called.

    The others take their columns of the result, as long as they are called with the very same
    tensor. A model that calls them otherwise gets separate products from then on.
    """

    def __init__(self, packed: PackedWeight, parts: Sequence[FusedLinear], stash: Stash) -> None:
        self.packed = packed
        self._stash = stash
        self._last = len(parts) - 1
        self.is_fused = True
        self.bias = None
        if any(part.bias is not None for part in parts):
            self.bias = torch.zeros(packed.columns)
        self._columns: list[slice] = []
        firsts = first_columns([part.packed for part in parts])
        for index, (part, first) in enumerate(zip(parts, firsts, strict=True)):
            part.product, part.index = self, index
            self._columns.append(slice(first, first + part.packed.columns))
            if self.bias is not None and part.bias is not None:
                self.bias[self._columns[-1]] = part.bias

    def multiply(self, index: int, part: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        """Return the product of one part: [..., its columns]."""
        if not self.is_fused:
            return part.packed.multiply(rows, part.bias)
        if index == 0:
            output = self.packed.multiply(rows, self.bias)
            self._stash.content = (self, rows, output)
            return output[..., self._columns[0]]
        content = self._stash.content
        if content is None or content[0] is not self or content[1] is not rows:
            self.is_fused = False
            self._stash.content = None
            return part.packed.multiply(rows, part.bias)
        if index == self._last:
            self._stash.content = None
        return content[2][..., self._columns[index]]


class Stash:
    """The input and the result of the fused product that ran last; one of a model."""

    def __init__(self) -> None:
        self.content: tuple[FusedProduct, torch.Tensor, torch.Tensor] | None = None


class FusedLinear(PackedLinear):
    """One linear layer of several that are computed together."""

    product: FusedProduct
    """What it is a part of; the product sets it, and the number of the part."""
    index: int

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., columns] of [..., depth]."""
        return self.product.multiply(self.index, self, rows)


class PackedEmbedding(PackedModule):
    """Stands for an embedding: reads its rows from the packed form, which a tied head may share."""

    def __init__(self, packed: PackedWeight, original: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(packed, original, dtype)
        self._dtype = dtype
        self._is_scaled = type(original) is not nn.Embedding

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden size] of [...] token ids."""
        rows = self.packed.rows(token_ids).to(self._dtype)
        if self._is_scaled:
            rows *= self.original.get_buffer("embed_scale").to(self._dtype)
        return rows


def pack_linears(
    model: PreTrainedModel,
    kernels: Kernels,
    dtype: torch.dtype = torch.float32,
    rounded: Collection[str] = (),
) -> None:
    """Pack the linear layers and the input embedding of a model, one after the other.

    A weight is freed as soon as its packed form stands, so the memory of the model never grows by
    more than its largest weight.

    Args:
        model: a model of cbgen's own, on the CPU; weights in any floating dtype.
        kernels: the library.
        dtype: of the activations; the dtype that the packed layers claim for their weights.
        rounded: names of the weights that become int8; the others keep every value.

    Raises:
        EngineError: a packed layer does not compute what the original did.
    """
    packer = _Packer(model, kernels, dtype, rounded)
    embedding = model.get_input_embeddings()
    for parent in list(model.modules()):
        for names in _FUSED_NAMES:
            packer.fuse([getattr(parent, name, None) for name in names])
    for module in list(model.modules()):
        if _is_plain_linear(module) or (module is embedding and _is_plain_embedding(module)):
            packer.swap(module)
    if next(model.parameters(), None) is None:
        marker = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        model.register_parameter(_MARKER, marker)
    give_back()


def unpack_linears(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
    """Put the original modules back, with their weights in `dtype`; weights stay tied."""
    model._parameters.pop(_MARKER, None)
    parameters: dict[int, nn.Parameter] = {}
    places = _places(model)
    for module in [module for module in model.modules() if isinstance(module, PackedModule)]:
        original = module.original
        key = id(module.packed)
        if key not in parameters:
            weight = module.packed.unpack(dtype)
            if isinstance(original, Conv1D):
                weight = weight.t().contiguous()
            parameters[key] = nn.Parameter(weight, requires_grad=False)
        original.weight = parameters[key]
        for parent, name in places[id(module)]:
            setattr(parent, name, original)


def packable_weights(model: PreTrainedModel) -> list[str]:
    """Return the names of the weights that `pack_linears` packs, as far as their classes tell.

    The weights may be on the meta device.
    """
    embedding = model.get_input_embeddings()
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module) in _LINEARS or (module is embedding and _is_known_embedding(module))
    ]


def is_packable(module: nn.Module) -> bool:
    """Whether a module is one that `pack_linears` knows, and on the CPU."""
    return _is_plain_linear(module) or _is_plain_embedding(module)


def packed_bytes(model: nn.Module) -> int:
    """Return the memory of all packed weights of a model, shared ones once."""
    weights = [module.packed for module in model.modules() if isinstance(module, PackedModule)]
    return sum({weight.panels.data_ptr(): weight.num_bytes for weight in weights}.values())


class _Packer:
    """Owns what is known of a model while it is packed: where modules are, who shares weights."""

    def __init__(
        self,
        model: nn.Module,
        kernels: Kernels,
        dtype: torch.dtype,
        rounded: Collection[str],
    ) -> None:
        self._kernels = kernels
        self._dtype = dtype
        self._rounded = {id(model.get_parameter(name)) for name in rounded}
        self._memory = WeightMemory()
        self._stash = Stash()
        self._replaced: set[int] = set()
        self._places = _places(model)
        self._users: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._users.setdefault(id(parameter), []).append(module)

    def swap(self, module: nn.Module) -> None:
        """Pack a weight and swap all modules that use it; none if one of them is not known."""
        if id(module) in self._replaced:
            return  # together with another module of the same weight
        users = self._users[id(module.get_parameter("weight"))]
        if not all(_is_plain_linear(user) or _is_plain_embedding(user) for user in users):
            return
        matrix = _matrix(module)
        if any(_matrix(user).shape != matrix.shape for user in users):
            return
        packed = PackedWeight.pack(matrix, self._kernels, self._packed_dtype(module), self._memory)
        check_packed(matrix, packed)
        for user in users:
            kind = PackedEmbedding if isinstance(user, nn.Embedding) else PackedLinear
            self._replace(user, kind(packed, user, self._dtype))

    def fuse(self, modules: Sequence[nn.Module | None]) -> None:
        """Pack layers side by side, if all are there, alike and used once."""
        layers = [module for module in modules if module is not None and self._is_single(module)]
        if len(layers) != len(modules):
            return
        matrices = [_matrix(layer) for layer in layers]
        dtypes = {self._packed_dtype(layer) for layer in layers}
        if len(dtypes) > 1 or len({matrix.shape[1] for matrix in matrices}) > 1:
            return
        whole, all_packed = PackedWeight.pack_side_by_side(
            matrices, self._kernels, dtypes.pop(), self._memory
        )
        parts = []
        for layer, matrix, packed in zip(layers, matrices, all_packed, strict=True):
            check_packed(matrix, packed)
            parts.append(FusedLinear(packed, layer, self._dtype))
            self._replace(layer, parts[-1])
        FusedProduct(whole, parts, self._stash)

    def _packed_dtype(self, module: nn.Module) -> torch.dtype:
        if id(module.get_parameter("weight")) in self._rounded:
            return torch.int8
        return self._kernels.exact_dtype(_matrix(module))

    def _is_single(self, module: nn.Module) -> bool:
        return (
            _is_plain_linear(module)
            and len(self._users[id(module.get_parameter("weight"))]) == 1
            and len(self._places[id(module)]) == 1
        )

    def _replace(self, old: nn.Module, new: nn.Module) -> None:
        self._replaced.add(id(old))
        for parent, name in self._places[id(old)]:
            setattr(parent, name, new)


def _places(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the parents of every module, and its names there."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(id(child), []).append((parent, name))
    return places


def _matrix(module: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer or an embedding as [columns, depth]."""
    weight = module.get_parameter("weight").detach()
    return weight.t() if isinstance(module, Conv1D) else weight


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) in _LINEARS and _is_plain(module)


def _is_known_embedding(module: nn.Module) -> bool:
    return type(module) is nn.Embedding or (
        isinstance(module, nn.Embedding) and type(module).__name__.endswith(_SCALED_EMBEDDING)
    )


def _is_plain_embedding(module: nn.Module) -> bool:
    """Whether it looks rows up, or multiplies them with a number as the Gemmas do."""
    if not isinstance(module, nn.Embedding) or not _is_known_embedding(module):
        return False
    if not _is_plain(module) or module.max_norm is not None:
        return False
    if type(module) is nn.Embedding:
        return True
    scale = getattr(module, "embed_scale", None)
    if not isinstance(scale, torch.Tensor):
        return False
    token_ids = torch.arange(min(_CHECKED_IDS, module.num_embeddings))
    weight = module.weight.detach()
    looked_up: torch.Tensor = module(token_ids).detach()
    return torch.equal(looked_up, weight[token_ids] * scale.to(weight.dtype))


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing but the class decides what the module computes, and it is on the CPU."""
    weight = getattr(module, "weight", None)
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in FORMATS
        and weight.dim() == 2
        and weight.numel() > 0
        and not any(getattr(module, name) for name in _HOOKS)
        and "forward" not in vars(module)
    )
