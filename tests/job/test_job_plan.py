"""What `cbgen plan` tells of cache and memory, for models with and without windows."""

from __future__ import annotations

import pytest
import transformers

from cbgen.cli.plan import plan_sections
from cbgen.engine.build import build_engine
from cbgen.engine.config import ContinuousBatchingConfig
from cbgen.engine.model.attach import attached
from cbgen.io.inputs import Inputs
from cbgen.job.dry_run import plan_job
from cbgen.recipe.load import recipe_from_mapping
from tests.helpers.commands import jsonl
from tests.helpers.models import CONTEXT, WINDOW, random_model, tiny_config

PAGE = 4
BATCH_TOKENS = 8
MOST_IN_WINDOW = -(-(WINDOW - 1 + BATCH_TOKENS) // PAGE) + 1
PART_OF_DEVICE = ("weights", "cache", "logits", "activations", "block_tables", "host_pool")


def windowed_config():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    return tiny_config("gemma3", num_hidden_layers=6, layer_types=kinds)


@pytest.fixture
def summary(checkpoint, tmp_path):
    """Plan a run over rows of token ids; `is_windowed` chooses the model."""

    def make(lengths=None, *changes: str, is_windowed: bool = False) -> dict:
        path = checkpoint
        if is_windowed:
            path = tmp_path / "windowed"
            windowed_config().save_pretrained(path)
        recipe = {
            "model": {"path": str(path), "dtype": "float32", "device": "cpu"},
            "generation_config": {"max_new_tokens": 8},
            "continuous_batching_config": {"page_size": PAGE, "max_batch_tokens": BATCH_TOKENS},
        }
        inputs = None
        if lengths is not None:
            source = tmp_path / "in.jsonl"
            source.write_bytes(jsonl(*({"prompt_token_ids": [5] * n} for n in lengths)))
            inputs = Inputs([str(source)])
        recipe = recipe_from_mapping(recipe, [f"continuous_batching_config.{c}" for c in changes])
        return plan_job(recipe, inputs).summary

    return make


def lines(summary: dict, section: str) -> dict[str, str]:
    """Return value and remark of every line of a section, by label."""
    entries = dict(plan_sections(summary))[section]
    return {entry.label: f"{entry.value} {entry.note}".strip() for entry in entries}


def test_memory_parts_add_up(summary):
    memory = summary()["memory"]
    assert sum(memory[part] for part in PART_OF_DEVICE) + memory["left_free"] == memory["free_now"]
    assert all(memory[part] > 0 for part in ("weights", "cache", "logits", "activations"))


def test_a_host_pool_is_part_of_a_cpus_memory(summary):
    planned = summary(None, "num_blocks=8", "cpu_offload_space=0.001")
    pool = planned["host_pool"]
    assert pool["bytes"] == pool["blocks"] * planned["cache"]["block_bytes"] > 0
    assert planned["memory"]["host_pool"] == pool["bytes"]
    assert lines(planned, "cache")["host pool"].startswith(f"{pool['blocks']:,} blocks")


def test_a_plain_model_has_one_kind_of_layers_and_one_block_size(summary):
    planned = summary(None, "num_blocks=64")
    (kind,) = planned["groups"]
    assert (kind["attention"], kind["layers"], kind["groups"]) == ("full", 2, 1)
    assert kind["most_blocks_per_request"] is None
    assert planned["cache"]["pool_blocks"] == planned["cache"]["blocks"] == 64
    assert planned["cache"]["tokens"] == planned["cache"]["longest_request"] == 256
    assert "blocks of the pool" not in lines(planned, "cache")


def test_kinds_of_layers_are_told_with_their_windows(summary):
    planned = summary(None, "num_blocks=64", is_windowed=True)
    sliding, full = planned["groups"]
    assert (sliding["attention"], sliding["window"], sliding["layers"]) == ("sliding", WINDOW, 5)
    assert (full["attention"], full["layers"], full["groups"]) == ("full", 1, 1)
    num_groups = sliding["groups"] + full["groups"]
    assert planned["cache"]["pool_blocks"] == 64 * num_groups
    assert sliding["most_blocks_per_request"] == MOST_IN_WINDOW
    shown = lines(planned, "cache")
    assert shown[f"sliding, {WINDOW} tokens"].startswith("5 layers")
    assert shown["full attention"].startswith("1 layer ")
    assert "blocks of the pool" in shown


def test_requests_at_once_take_no_more_than_windows_need(summary):
    planned = summary([9, 121], "num_blocks=64", "max_requests_per_batch=8", is_windowed=True)
    num_windowed = planned["groups"][0]["groups"]
    pool, at_once = planned["cache"]["pool_blocks"], planned["requests_at_once"]

    def fitting(pages: float) -> int:
        return min(8, int(pool / (pages + num_windowed * min(pages, MOST_IN_WINDOW))))

    assert at_once["of_longest"] == fitting(128 / PAGE)
    assert at_once["of_average_length"] == fitting((16 + 128) / 2 / PAGE)
    assert at_once["of_full_context"] == fitting(CONTEXT / PAGE)
    blocks = 128 // PAGE + num_windowed * MOST_IN_WINDOW
    assert planned["workload"]["useful_blocks"] == -(-2 * blocks // (1 + num_windowed))
    assert at_once["of_longest"] > int(64 / (128 / PAGE)), "whole sequences would fit no more"


def test_the_rows_say_how_many_blocks_are_of_use(summary):
    planned = summary([9, 41], "num_blocks=64", "max_requests_per_batch=8")
    assert planned["workload"] == {
        "max_prompt_length": 41,
        "max_generated_length": 8,
        "num_requests": 2,
        "useful_blocks": 2 * 48 // PAGE,
    }
    assert lines(planned, "at once")["useful blocks"].startswith("24 ")


def test_without_rows_no_workload_is_known(summary):
    assert summary()["workload"] is None


@pytest.mark.parametrize("shares", [True, False])
def test_prefix_sharing_is_told_with_its_reason(summary, shares):
    planned = summary(None, f"allow_block_sharing={str(shares).lower()}")
    assert planned["cache"]["shares_prefixes"] is shares
    shown = lines(planned, "cache")["prefix sharing"]
    assert shown == ("on command line" if shares else "off command line")


def test_new_settings_are_decisions_with_their_origin(summary):
    changes = ("scheduler_type=prefill_first", "max_queue_size=7", "num_blocks=8")
    decisions = summary(None, *changes, "cpu_offload_space=0.5")["decisions"]
    found = {
        name.partition(".")[2]: (item["value"], item["reason"]) for name, item in decisions.items()
    }
    assert found["scheduler_type"] == ("prefill_first", "command line")
    assert found["safety_margin"] == (0.0, "default of prefill_first")
    assert found["max_queue_size"] == (7, "command line")
    assert found["allow_block_sharing"] == (True, "default")
    assert found["cpu_offload_space"] == (0.5, "command line")


def test_warnings_of_the_plan_are_shown(summary):
    planned = summary(None, "num_blocks=8", "cpu_offload_space=1e-9")
    (warning,) = planned["warnings"]
    assert "too small for one block" in warning
    assert lines(planned, "cache")["warning"] == warning
    assert lines(planned, "cache")["host pool"].startswith("off")


@pytest.mark.parametrize("is_windowed", [False, True])
def test_the_plan_without_weights_is_that_of_the_run(summary, checkpoint, is_windowed):
    changes = ("num_blocks=64", "cpu_offload_space=0.001")
    planned = summary(None, *changes, is_windowed=is_windowed)
    if is_windowed:
        model = random_model(transformers.Gemma3ForCausalLM, windowed_config())
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    config = ContinuousBatchingConfig(
        page_size=PAGE, max_batch_tokens=BATCH_TOKENS, num_blocks=64, cpu_offload_space=0.001
    )
    with attached(model):
        built = build_engine(model, config)
        plan = built.plan
    assert planned["cache"] == {
        "blocks": plan.cache.num_blocks,
        "page_size": plan.cache.page_size,
        "tokens": plan.cache.num_blocks * plan.cache.page_size,
        "pool_blocks": plan.cache.num_pool_blocks,
        "block_bytes": plan.cache.block_bytes,
        "longest_request": min(plan.max_context, plan.cache.max_tokens),
        "shares_prefixes": plan.shares_prefixes,
    }
    assert planned["host_pool"]["blocks"] == plan.cache.num_host_blocks
