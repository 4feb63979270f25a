"""Every transport passes one suite, and a fault on the way is an error that names it, never a wrong number."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import stageline as sl
from stageline.common.errors import PeerFailed, TransportError
from stageline.testing import FaultyTransport, assert_same_bits, exercise, one_process_step, run_ranks
from stageline.testing.conformance import _assert_same
from stageline.transport import wire
from stageline.transport.gpu.payloads import Payloads
from stageline.transport.protocol import Header, Message
from stageline.transport.tcp.links import Links
from stageline.transport.tcp.transport import SocketTransport
from stageline.transport.threads import ThreadHub
from support.gloo_pairs import gloo_payloads
from support.pipelines import batch, blocks
from support.threads import JOB, left_over


def test_threads_pass_the_suite() -> None:
    hub = ThreadHub(2)
    failures: list[BaseException] = []

    def side(rank: int) -> None:
        try:
            exercise(hub.end(rank), lambda expected, owed: None, lambda: None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=side, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def process_side(rank: int, apart: bool) -> tuple[str, list[str]]:
    transport = SocketTransport(Links.join(), payloads=gloo_payloads() if apart else None)
    exercise(transport, transport.begin, lambda: transport.finish(30.0))
    return "passed", left_over(allowed=JOB)


@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "tensors on groups of their own"])
def test_processes_pass_the_suite(apart: bool) -> None:
    for outcome, threads in run_ranks(process_side, 2, apart):
        assert outcome == "passed"
        assert threads == [], "no thread is left behind"


def any_message(chance: random.Random, header: Header) -> Message:
    """Leaves of any kind and number; tensors of any type, shape and layout, large ones among them."""
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    leaves: list[Any] = []
    for _ in range(chance.randrange(4)):
        shape = [chance.choice([1, 3, 8, 200]) for _ in range(chance.randrange(4))]
        generator = torch.Generator().manual_seed(chance.randrange(1000))
        tensor = (100 * torch.rand(shape, generator=generator)).to(chance.choice(dtypes))
        turned = tensor.transpose(0, -1) if shape and chance.random() < 0.3 else tensor
        leaves.append(chance.choice([turned, turned, turned, None, chance.random(), "text"]))
    return Message(header, leaves, chance.choice(["", "a tree"]), [chance.random() < 0.5 for _ in leaves])


def sends_anything(rank: int, seeds: range) -> int:
    """Both ranks send and receive on both channels in any order, of which one, both or none has a communicator."""
    known, links = gloo_payloads(), Links.join()
    count = 0
    for seed in seeds:
        chance = random.Random(seed)
        payloads = Payloads()
        ends = [(source, 1 - source, traffic) for source in (0, 1) for traffic in ("forward", "backward")]
        payloads.update({end: known[end] for end in ends if chance.random() < 0.7})  # type: ignore[index,misc]
        transport = SocketTransport(links, payloads, seed)
        sizes = {end: chance.randrange(6) for end in ends}
        sent = {
            end: [any_message(chance, Header(*end, 0, number, seed)) for number in range(size)]  # type: ignore[arg-type]
            for end, size in sizes.items()
        }
        transport.begin(
            {(end[0], end[2]): sizes[end] for end in ends if end[1] == rank},  # type: ignore[misc]
            {(end[1], end[2]): sizes[end] for end in ends if end[0] == rank},  # type: ignore[misc]
        )
        work = [end for end in ends for _ in sent[end]]
        random.Random(10 * seed + rank).shuffle(work)
        turns = dict.fromkeys(ends, 0)
        for end in [end for end in work if end[0] == rank] + [end for end in work if end[1] == rank]:
            message = sent[end][turns[end]]
            turns[end] += 1
            if end[0] == rank:
                transport.send(message)
                continue
            received = transport.receive(message.header, 30.0)
            assert (received.tree, list(received.wants_gradient)) == (message.tree, list(message.wants_gradient))
            for mine, theirs in zip(message.leaves, received.leaves, strict=True):
                _assert_same(mine, theirs)
            count += 1
        transport.finish(30.0)
    return count


def test_any_messages_arrive_whole_and_in_order_beside_their_headers() -> None:
    assert sum(run_ranks(sends_anything, 2, range(40), timeout=120)) > 200


def faulty(deadline: float = 60.0, **faults: Callable[[Any], Any]) -> sl.Pipeline:
    pipe = sl.Pipeline(
        blocks(4), loss_fn=functional.mse_loss, schedule="1f1b", ranks=4, microbatches=4, deadline=deadline
    )
    honest = pipe.runner.host.transport
    pipe.runner.host.transport = lambda rank: FaultyTransport(honest(rank), **faults)  # type: ignore[method-assign]
    return pipe


def test_a_message_that_is_lost_is_named_by_who_waited_for_it() -> None:
    def drop(header: Header) -> bool:
        return header.traffic == "forward" and header.stage == 1 and header.microbatch == 2

    pipe = faulty(1.0, drop=drop)
    with pytest.raises(sl.PipelineError, match="the output of stage 1, microbatch 2") as caught:
        pipe.step(*batch())
    assert isinstance(caught.value.__cause__, TransportError)


def test_a_message_with_another_label_is_refused() -> None:
    pipe = faulty(relabel=lambda header: replace(header, microbatch=3) if header.microbatch == 1 else header)
    with pytest.raises(sl.PipelineError, match=r"expected the output of .* microbatch 1.* got .* microbatch 3"):
        pipe.step(*batch())


def test_a_slow_message_changes_no_bit() -> None:
    pipe, plain = faulty(delay=lambda header: 0.01 if header.microbatch % 2 else 0.0), blocks(4)
    torch.set_num_threads(1)
    pipe.step(*batch())
    sl.Pipeline(plain, loss_fn=functional.mse_loss, schedule="gpipe", ranks=1, microbatches=4).step(*batch())
    for name, grad in pipe.named_gradients():
        other = dict(plain.named_parameters())[name].grad
        assert torch.equal(torch.as_tensor(grad), other)


def test_a_gradient_of_another_type_than_its_output_is_refused() -> None:
    """A sender that announces what it sends, and sends what no output of the receiver can have."""

    class Wrong(FaultyTransport):
        def send(self, message: Message) -> None:
            if message.header.traffic == "backward":
                message = Message(message.header, [leaf.double() for leaf in message.leaves], "", [False])  # type: ignore[union-attr]
            self.inner.send(message)

    pipe = sl.Pipeline(blocks(2), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=2)
    honest = pipe.runner.host.transport
    pipe.runner.host.transport = lambda rank: Wrong(honest(rank))  # type: ignore[method-assign]
    with pytest.raises(sl.PipelineError, match=r"stage 0 returned a tensor .*float32, but got a gradient .*float64"):
        pipe.step(*batch())


def test_a_message_that_comes_twice_is_refused() -> None:
    pipe = faulty(repeat=lambda header: header.microbatch == 1)
    with pytest.raises(sl.PipelineError, match=r"expected the output of .* microbatch 2.* got .* microbatch 1"):
        pipe.step(*batch())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"[]",
        b'[[0, 1, "sideways", 0, 0, 0], [], "", [], null]',
        b'[[0, 1, "forward", "0", 0, 0], [], "", [], null]',
        b'[[0, 1, "forward", true, 0, 0], [], "", [], null]',
        b'[[0, 1, "forward", 0, 0, 0], [["float33", [1], "cpu", false, null]], "", [], null]',
        b'[[0, 1, "forward", 0, 0, 0], [["float32", [-1], "cpu", false, null]], "", [], null]',
        b'[[0, 1, "forward", 0, 0, 0], [["float32", [2], "cpu", false, [1, 1]]], "", [], null]',
        b'[[0, 1, "forward", 0, 0, 0], [{}], "", [], null]',
        b"\xff",
    ],
)
def test_a_header_that_cannot_be_read_is_refused(text: bytes) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        wire.decode_announcement(text)


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(TransportError, match="not a message"):
        wire.read_head(bytes(wire.HEAD))
    prefix, text = wire.read_head(wire.write_head(1, b"[]", 7))
    assert (prefix.turn, prefix.payload, text) == (1, 7, b"[]")
    with pytest.raises(TransportError, match="checksum"):
        wire.check_text(b"{}", prefix)


def garbage(rank: int) -> str:
    """Rank 0 sends bytes that are not a message."""
    links = Links.join()
    transport = SocketTransport(links)
    if rank == 0:
        links.outbound(1, "forward").link.sendall(bytes(wire.HEAD))
        dist.barrier()
        return ""
    transport.begin({(0, "forward"): 1}, {})
    with pytest.raises(PeerFailed, match="bytes that are not a message"):
        transport.receive(Header(0, 1, "forward", 0, 0, 0), 30.0)
    with pytest.raises(TransportError, match="could not end its step"):
        transport.finish(1.0)
    with pytest.raises(
        TransportError, match=r"lost its connections in an earlier step: .*restart the processes"
    ) as caught:
        transport.begin({}, {})
    dist.barrier()
    return str(caught.value)


def test_garbage_on_the_wire_ends_the_channel_and_not_the_process() -> None:
    assert "not a message" in run_ranks(garbage, 2)[1]


def too_many(rank: int) -> None:
    transport = SocketTransport(Links.join())
    counts = {(1 - rank, "forward"): 1}
    transport.begin(counts, counts)  # type: ignore[arg-type]
    mine, other = Header(rank, 1 - rank, "forward", 0, 0, 0), Header(1 - rank, rank, "forward", 0, 0, 0)
    transport.send(Message(mine, [1], "", [False]))
    for header in (mine, replace(mine, traffic="backward"), replace(mine, target=rank), replace(mine, target=5)):
        with pytest.raises(TransportError, match=r"tries to send one more|there is no such channel"):
            transport.send(Message(header, [2], "", [False]))
    assert list(transport.receive(other, 30.0).leaves) == [1]
    transport.finish(30.0)


def test_a_sender_refuses_what_its_receiver_does_not_expect() -> None:
    run_ranks(too_many, 2)


def keeps(rank: int) -> tuple[int, int, float, float]:
    """Train with 64 microbatches, and check after every send how much is kept."""
    pipe = sl.Pipeline(blocks(4), loss_fn=functional.mse_loss, schedule="1f1b", ranks=2, microbatches=64)
    transport: Any = pipe.runner.host.transport(rank)
    kept: list[int] = []
    honest = transport.send

    def send(message: Message) -> None:
        honest(message)
        kept.append(transport.kept)

    transport.send = send
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    loss = pipe.step(x, y).loss
    plain = one_process_step(blocks(4), functional.mse_loss, x, y, 64)
    return len(kept), max(kept), loss, plain


def test_what_is_kept_of_sent_messages_does_not_grow_with_the_microbatches() -> None:
    """1F1B is never more than two microbatches ahead; the rest is what the releasing thread has not processed yet."""
    for sent, kept, loss, plain in run_ranks(keeps, 2):
        assert sent == 64
        assert kept <= 16
        assert loss == plain


FAULTS: dict[str, tuple[dict[str, Callable[[Any], Any]], list[str]]] = {
    "microbatch": (
        {"relabel": lambda header: replace(header, microbatch=3) if header.microbatch == 1 else header},
        ["expected the output of stage 0, microbatch 1", "got the output of stage 0, microbatch 3"],
    ),
    "stage": (
        {"relabel": lambda header: replace(header, stage=2) if header.microbatch == 1 else header},
        ["expected the output of stage 0, microbatch 1", "got the output of stage 2, microbatch 1"],
    ),
    "source": (
        {"relabel": lambda header: replace(header, source=2) if header.microbatch == 1 else header},
        ["expected the output of stage 0, microbatch 1", "of rank 0, but got", "microbatch 1, step 0, of rank 2"],
    ),
    "step": (
        {"relabel": lambda header: replace(header, step=5) if header.microbatch == 1 else header},
        ["expected the output of stage 0, microbatch 1, step 0", "got the output of stage 0, microbatch 1, step 5"],
    ),
    "target": (
        {"relabel": lambda header: replace(header, target=2) if header.microbatch == 1 else header},
        ["rank 0 has sent all forward messages that rank 2 expects in this step", "microbatch 1"],
    ),
    "unreadable": (
        {"relabel": lambda header: replace(header, microbatch="one") if header.microbatch == 1 else header},
        ["expected the output of stage 0, microbatch 1", "a header that cannot be read arrived", "'one'"],
    ),
    "type": (
        {"replaced": lambda message: [leaf.to(torch.bfloat16) for leaf in message.leaves]},
        [
            "expected the output of stage 0, microbatch 0",
            "[float32 of shape (3, 3, 8)]",
            "got [bfloat16 of shape (3, 3, 8)]",
        ],
    ),
    "shape": (
        {"replaced": lambda message: [leaf[:1] for leaf in message.leaves]},
        [
            "expected the output of stage 0, microbatch 0",
            "[float32 of shape (3, 3, 8)]",
            "got [float32 of shape (1, 3, 8)]",
        ],
    ),
    "lost": (
        {"drop": lambda header: header.microbatch == 3},
        ["waited 4 s for the ", "microbatch ", "it did not arrive"],
    ),
    "lost before another": (
        {"drop": lambda header: header.microbatch == 1},
        ["expected the output of stage 0, microbatch 1", "got the output of stage 0, microbatch 2"],
    ),
    "repeated": (
        {"repeat": lambda header: header.microbatch == 0},
        ["expected the output of stage 0, microbatch 1", "got the output of stage 0, microbatch 0"],
    ),
    "repeated at the end": (
        {"repeat": lambda header: header.microbatch == 3},
        ["rank 0 has sent all forward messages that rank 1 expects in this step", "microbatch 3"],
    ),
}


def only(active: list[bool], name: str) -> dict[str, Callable[[Any], Any]]:
    """The fault, as long as it is active, and only for forward messages."""

    def planted(fault: Callable[[Any], Any], honest: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda it: (fault if active and getattr(it, "header", it).traffic == "forward" else honest)(it)

    honest: dict[str, Callable[[Any], Any]] = {
        "relabel": lambda header: header,
        "replaced": lambda message: message.leaves,
        "drop": lambda header: False,
        "repeat": lambda header: False,
    }
    return {kind: planted(fault, honest[kind]) for kind, fault in FAULTS[name][0].items()}


def suffers(rank: int, names: list[str], apart: bool) -> dict[str, list[str]]:
    """Plant every fault in turn on rank 0, in a step and in an evaluation; train correctly after each."""
    errors: dict[str, list[str]] = {}
    sl.Pipeline(blocks(3), loss_fn=functional.mse_loss, ranks=3, microbatches=4, deadline=60.0)  # all have connected
    for name in names:
        active = [True]
        pipe = sl.Pipeline(
            blocks(3), loss_fn=functional.mse_loss, schedule="1f1b", ranks=3, microbatches=4, deadline=4.0
        )
        host: Any = pipe.runner.host
        if apart:
            host._transport._payloads = gloo_payloads()
        if rank == 0:
            faulty = FaultyTransport(host.transport(0), **only(active, name))
            host.transport = lambda rank, faulty=faulty: faulty
        errors[name] = []
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(sl.PipelineError) as caught:
                call(*batch())
            errors[name].append(str(caught.value))
        active.clear()
        pipe.deadline = 30.0
        pipe.zero_grad()
        plain = blocks(3)
        assert pipe.step(*batch()).loss == one_process_step(plain, functional.mse_loss, *batch(), microbatches=4)
        expected = dict(plain.named_parameters())
        assert_same_bits(dict(pipe.named_gradients()), {key: expected[key].grad for key, _ in pipe.named_gradients()})
    assert left_over(allowed=JOB) == []
    return errors


@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "tensors on groups of their own"])
def test_faults_on_one_process_are_named_on_all_and_harm_no_later_step(apart: bool) -> None:
    names = ["microbatch", "type", "lost", "repeated at the end"] if apart else list(FAULTS)
    answers = run_ranks(suffers, 3, names, apart, timeout=500)
    for name in names:
        step, evaluation = answers[0][name]
        assert all(answer[name] == [step, evaluation] for answer in answers), (name, answers)
        for words in FAULTS[name][1]:
            assert words in step, (name, words, step)
    evaluation = answers[0]["lost"][1]
    assert "rank 1 stopped waiting for the output of stage 0, microbatch 3" in evaluation
    assert "rank 0 ended its step without sending it" in evaluation
