"""The adding half of the manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import GenerationConfig

from cbgen.manager.intake import Intake
from cbgen.manager.mail import Mailbox
from cbgen.manager.requests import RequestForm, check_request_id
from cbgen.manager.settings import check_names, generation_fields
from cbgen.manager.token_inputs import TokenInput, TokenInputs, prompt_id_list, prompt_id_lists
from cbgen.values import show_argument

T = TypeVar("T")


class RequestAdder:
    """Takes requests and cancels them. All methods are thread-safe."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    def add_request(
        self,
        input_ids: TokenInput,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **sampling: Any,  # noqa: ANN401  any field of a generation config
    ) -> str:
        """Add a request; it runs as soon as there is room.

        Waits while `max_queue_size` requests wait already. A wrong value (an empty prompt, an id
        that is taken, a temperature below 0, ...) makes the request fail: its output says why.

        Args:
            input_ids: token ids of the prompt: a list, an array, a tensor, or what a tokenizer
                returns for one text (without the tokens that its attention mask hides).
            request_id: id of the request, a text; None = `req_N`.
            max_new_tokens: most tokens to generate.
            streaming: give an output after each step that gave tokens; `request_id_iter`.
            record_timestamps: note in `timestamps` when each token was there.
            eos_token_id: ids that end the answer, in place of those of the generation config.
            sampling: other fields of a generation config, for this request alone: `temperature`,
                `top_k`, `top_p`, `do_sample`, `seed`, `num_return_sequences`, ... Further samples
                of a request have the ids `ID__child#0`, `ID__child#1`, ...

        Returns:
            The id.

        Raises:
            TypeError: a keyword is unknown, the prompt is no list of integers, the id no text.
            ManagerStopped: the manager was stopped or destroyed.
            EngineDied: the engine has died.
        """
        fields = sampling | {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        check_names(fields)
        form = RequestForm(streaming=streaming, record_timestamps=record_timestamps, fields=fields)
        return self.add([(request_id, prompt_id_list(input_ids), form)])[0][0]

    def add_requests(
        self,
        inputs: TokenInputs,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        *,
        request_ids: Sequence[str | None] | None = None,
        generation_configs: Sequence[GenerationConfig | Mapping[str, Any] | None] | None = None,
        **sampling: Any,  # noqa: ANN401  any field of a generation config
    ) -> list[str]:
        """Add several requests together, in their order.

        Args:
            inputs: token ids of each prompt, or what a tokenizer returns for several texts.
            max_new_tokens: for each, as in `add_request`.
            streaming: as in `add_request`.
            record_timestamps: as in `add_request`.
            request_ids: an id, or None, for each of them.
            generation_configs: for each of them fields of its own, in a mapping or a
                GenerationConfig, or None; they win over the keywords, which hold for all.
            sampling: as in `add_request`.

        Returns:
            The ids, in the order of `inputs`.

        Raises:
            TypeError, ManagerStopped, EngineDied: as `add_request`.
            ValueError: `request_ids` or `generation_configs` are more or fewer than `inputs`.
            UsageError: one of `generation_configs` is none.
        """
        prompts = prompt_id_lists(inputs)
        ids = _one_for_each("request_ids", request_ids, len(prompts))
        configs = _one_for_each("generation_configs", generation_configs, len(prompts))
        own = [
            generation_fields(item, f"generation_configs[{place}]")
            for place, item in enumerate(configs)
        ]
        shared = sampling | {"max_new_tokens": max_new_tokens}
        for fields in [shared, *own]:
            check_names(fields)
        forms = [
            RequestForm(
                streaming=streaming, record_timestamps=record_timestamps, fields=shared | fields
            )
            for fields in own
        ]
        samples = self.add(list(zip(ids, prompts, forms, strict=True)))
        return [sample_ids[0] for sample_ids in samples]

    def add(
        self,
        given: Sequence[tuple[str | None, list[int], RequestForm]],
        follower: Mailbox | None = None,
    ) -> list[tuple[str, ...]]:
        """Add requests, each an id or None, a prompt and the rest; names of fields are known.

        Args:
            given: the requests.
            follower: is sent all of their outputs.

        Returns:
            The ids of each request's samples, the request's own first.

        Raises:
            ManagerStopped, EngineDied, TypeError: as `add_request`.
        """
        for request_id, _, _ in given:
            if request_id is not None:
                check_request_id(request_id)
        return self._intake.add(given, follower)

    def cancel_request(self, request_id: str) -> None:
        """End a request and its further samples now; each gives a CANCELLED output.

        A request that is unknown or has ended is left alone.

        Raises:
            TypeError: the id is no text.
        """
        check_request_id(request_id)
        self._intake.cancel(request_id)


def _one_for_each(name: str, given: Sequence[T | None] | None, count: int) -> list[T | None]:
    if given is None:
        return [None] * count
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            f"{name} must be a list of {count}, one for each input; got {show_argument(given)}"
        )
    values = list(given)
    if len(values) != count:
        raise ValueError(f"{len(values)} {name} were given for {count} inputs; give one for each")
    return values
