"""A stranger's configuration implies billions of parts, layers or experts.

Each reader computes the layout of its model. So every number is bounded, alone and in the products
that make up the layout, before anything is computed.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from pydantic import BaseModel

from swarm.config import RunConfig, parse_config, valid_keys
from swarm.config.run_settings import MAX_ELEMENTS, MAX_TENSORS, MAX_UNITS
from swarm.errors import BadBlob, ConfigError
from swarm.network.runs.run_records import decode_config
from swarm.protocol.records.records import RunRecord, RunState
from swarm.protocol.values.layout import layout_of
from tests.scenarios.swarms import EXACT

RUN = parse_config(RunConfig, EXACT, source="file")
WHOLE = re.compile(r"\bint\b")
NEAR_A_TRILLION = [  # as Kimi K2: 384 experts in 61 layers, 1.03 trillion parameters
    "model.vocab_size=163840", "model.hidden_size=7168", "model.num_hidden_layers=61",
    "model.num_attention_heads=64", "model.num_key_value_heads=64", "model.head_dim=128",
    "model.num_experts=384", "model.num_experts_per_tok=8", "model.moe_intermediate_size=2048",
    "wire.part_bytes=16777216",
]  # fmt: skip
AT_THE_BOUND = [
    "model.vocab_size=1048576", "model.hidden_size=5120", "model.num_hidden_layers=168",
    "model.num_attention_heads=64", "model.num_key_value_heads=64", "model.head_dim=128",
    "model.num_experts=1024", "model.num_experts_per_tok=8", "model.moe_intermediate_size=5120",
    "wire.part_bytes=12000000",
]  # fmt: skip


def configured(*overrides: str) -> RunConfig:
    return parse_config(RunConfig, EXACT, source="file", overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([*NEAR_A_TRILLION, "wire.part_bytes=4096"], r"wire\.part_bytes: .*limit 16384"),
        (["model.vocab_size=4294967296"], r"model\.vocab_size = .* 1048576"),
        (["model.hidden_size=4294967296"], r"model\.hidden_size = .* 131072"),
        (["model.num_hidden_layers=1000000000"], r"model\.num_hidden_layers = .* 4096"),
        (["model.num_hidden_layers=4096", "model.num_experts=2048"], r"layers: .*524288"),
        (["model.num_experts=4294967296"], r"model\.num_experts = .* 2048"),
        (["model.head_dim=1000000000"], r"model\.head_dim = .* 8192"),
        (["model.moe_intermediate_size=99999999999"], r"model\.moe_intermediate_size = .* 131072"),
        (["model.hidden_size=131072", "model.moe_intermediate_size=131072",
          "model.num_hidden_layers=100", "model.num_experts=8"], r"model\.hidden_size: the model"),
        (["run.rounds=99999999999999999999"], r"run\.rounds = "),
        (["round.seconds=1e300"], r"round\.seconds = .* 10000000"),
    ],
)  # fmt: skip
def test_the_error_names_the_key_and_the_bound(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        configured(*overrides)
    assert len(str(raised.value)) < 300


def test_no_whole_number_of_a_run_is_without_a_bound() -> None:
    """A new key must have a bound too."""
    values = RUN.model_dump(mode="json")
    values["phases"] = [{"until_tokens": 1, "local_steps": 1, "batch_tokens": 1}]
    for key in valid_keys(RunConfig):
        section, name = key.split(".")
        group: Any = values[section][0] if section == "phases" else values[section]
        kind: type[BaseModel] = RunConfig.model_fields[section].annotation  # type: ignore[assignment]
        is_number = isinstance(group[name], int) and not isinstance(group[name], bool)
        declared = str(getattr(kind, "model_fields", {}).get(name, ""))
        if not is_number and not WHOLE.search(declared):
            continue
        before, group[name] = group[name], 2**64
        with pytest.raises(ValueError, match="less than"):
            RunConfig.model_validate_json(json.dumps(values))
        group[name] = before


@pytest.mark.parametrize("overrides", [NEAR_A_TRILLION, AT_THE_BOUND], ids=["trillion", "bound"])
def test_a_layout_at_the_bound_is_there_at_once(overrides: list[str]) -> None:
    began = time.process_time()
    layout = layout_of(configured(*overrides))
    assert time.process_time() - began < 60
    assert len(layout.shapes) <= MAX_TENSORS and len(layout.units) <= MAX_UNITS
    assert sum(unit.num_elements for unit in layout.units) <= MAX_ELEMENTS


@pytest.mark.parametrize("field", ["num_experts", "vocab_size", "num_hidden_layers"])
def test_a_foreign_configuration_is_a_bad_blob(field: str) -> None:
    values = RUN.model_dump(mode="json")
    values["model"][field] = 10**400
    digest = "0" * 64
    record = RunRecord(
        run="exact-0123456789abcdef", name="exact", fingerprint=digest, founder="QmA",
        founding=digest, founding_bytes=1, config=digest, config_bytes=1,
        state=RunState.RUNNING, wait_for_peers=1,
    )  # fmt: skip
    with pytest.raises(BadBlob, check=lambda error: error.reason == "config_schema"):
        decode_config(json.dumps(values).encode(), record)
