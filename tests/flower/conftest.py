"""A Flower grid in memory: real messages and the real ClientApp, without processes or network."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from simfbo.flower.app import client_app
from simfbo.flower.deployment import Deployment


def copied(message: Message) -> Message:
    """Return a message as it arrives over the network: every object deflated and inflated."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    objects = {number: one.deflate() for number, one in get_all_nested_objects(message).items()}
    fresh = inflate_object_from_contents(message.object_id, objects)
    fresh.metadata.__dict__["_message_id"] = message.metadata.message_id
    return fresh


class MemoryGrid(Grid):
    """Nodes that reply as soon as they are polled; `spoil` may change or drop a reply."""

    def __init__(self, plan: Deployment, nodes: dict[int, dict]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
        self.plan, self.settings = plan, dict(nodes)
        self.app = client_app(lambda config: self.plan)
        self.online = set(nodes)
        self.spoil = lambda node, message, reply: reply
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self.states = {node: RecordDict() for node in nodes}
        self._waiting: dict[str, Message] = {}

    def set_run(self, run):
        raise NotImplementedError

    run = property(set_run)
    create_message = send_and_receive = set_run

    def get_node_ids(self):
        return sorted(self.online)

    def push_messages(self, messages):
        numbers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = number = f"message-{len(self.sent)}"
            self.sent.append(message)
            # Here, where a node would receive it: later, the limit on the response applies.
            self._waiting[number] = copied(message)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids):
        found = []
        for number in list(message_ids):
            if message := self._waiting.pop(number, None):
                reply = self._reply(message)
                node = message.metadata.dst_node_id
                if (reply := self.spoil(node, message, reply)) is not None:
                    found.append(reply)
        self.replies += found
        return found

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(7, node, self.settings[node], self.states.setdefault(node, RecordDict()),
                          {"seed": 0})  # fmt: skip
        try:
            return copied(self.app(message, context))
        except Exception as error:
            return Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)


def samples_of(data, client: int) -> tuple:
    """Return one client's lower and upper samples from federated data."""

    def part(split):
        start, count = int(split.start[client]), int(split.count[client])
        rows = np.asarray(split.rows)[start : start + count]
        return jax.tree.map(lambda a: np.asarray(a)[rows], split.samples)

    return part(data.lower), part(data.upper)


def parts(nodes: int) -> dict[int, dict]:
    """Return the settings of nodes that share the clients, by node ids as Flower draws them."""
    return {
        2**60 + 17 * part: {"partition-id": part, "num-partitions": nodes} for part in range(nodes)
    }


def deployed(task, algorithm, **options) -> Deployment:
    """Return the deployment of a task whose clients' data are all here."""
    settings = {"rounds": 4, "p": task.data.p, "batch_size": task.data.lower.batch_size}
    return Deployment(
        algorithm,
        task.x0,
        task.y0,
        task.data.n,
        lambda client, node: samples_of(task.data, client),
        samples_of(task.data, 0),
        **settings | options,
    )


@pytest.fixture
def flower():
    """Return what these tests share."""
    return SimpleNamespace(
        Grid=MemoryGrid, parts=parts, deployed=deployed, samples_of=samples_of, copied=copied
    )
