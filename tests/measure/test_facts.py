"""What the scheduler is read to say: the bytes that an opaque op adds, against a closed form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from opgraft.diagnostics.measure import collect
from opgraft.diagnostics.measure.facts import FactsReading
from opgraft.diagnostics.measure.ledger import lost_bytes
from opgraft.diagnostics.measure.question import Question
from opgraft.diagnostics.measure.subject import subject_of

import measured

SQUARE = "measuretest::square"
ROWS, COLUMNS = 256, 1024


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.measuretest.square(x * 1.1 + 0.1) * 0.9


@pytest.fixture(scope="module")
def facts() -> FactsReading:
    torch._dynamo.reset()
    question = Question(ops=(SQUARE,), references={SQUARE: measured.square}, alone_seconds=0.2)
    return collect.collect(subject_of(chain, torch.ones(ROWS, COLUMNS), train=False), question)


def test_the_compiler_makes_one_kernel_and_the_op_leaves_two_and_itself(facts: FactsReading) -> None:
    compiler, op = facts.arm("compiler"), facts.arm("op")
    assert compiler is not None
    assert op is not None
    assert (compiler.count("generated"), compiler.count("op")) == (1, 0)
    assert (op.count("generated"), op.count("op")) == (2, 1)


def test_lost_bytes_are_one_write_and_one_read_on_either_side_of_the_op(facts: FactsReading) -> None:
    compiler, op = facts.arm("compiler"), facts.arm("op")
    assert compiler is not None
    assert op is not None
    size = ROWS * COLUMNS * 4
    assert compiler.bytes() == 2 * size
    assert lost_bytes(op, compiler, facts.reference) == 4 * size


def test_time_is_split_by_who_wrote_the_kernel(facts: FactsReading) -> None:
    compiler, op = facts.arm("compiler"), facts.arm("op")
    assert compiler is not None
    assert op is not None
    assert compiler.op_us == 0
    assert op.op_us > 0
    assert compiler.generated_us > 0
    assert facts.alone_us["op"] > 0
    assert facts.calls == 1
