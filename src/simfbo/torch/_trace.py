"""From a PyTorch function to a graph: `torch.export`, then the table of operators."""

import contextlib
import io
import logging
import operator
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from simfbo.errors import UserError, plain, require
from simfbo.torch._graph import Dtype, Form, Graph, Node, Value
from simfbo.torch._order import require_no_order
from simfbo.torch.operators import ELEMENTWISE, KEPT, TABLE

_LOCK = threading.Lock()  # torch.export is not thread-safe
_SILENT = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
_TYPED = {
    "_to_copy",
    "arange",
    "cumprod",
    "cumsum",
    "empty",
    "empty_permuted",
    "full",
    "full_like",
    "mean",
    "prod",
    "scalar_tensor",
    "sum",
}
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "exponential", "poisson")
_MISTAKEN = ("multilabel_margin_loss_forward",)  # PyTorch decomposes it incorrectly
_UNLIKE = ("dtype", "reduce", "value_reduce")  # overloads with a different meaning
_DROPPED = {"device", "layout", "memory_format", "non_blocking", "pin_memory", "dtype"}


def trace(function: Callable[..., Any], structure: Any, form: Form) -> Graph:
    """Trace a PyTorch function of trees for inputs of one form.

    Args:
        function: of trees of tensors, to a tensor.
        structure: JAX's structure of its arguments.
        form: shapes and dtypes of the leaves.
    """
    torch = require("torch", "torch")
    # Indices and labels are int64 in PyTorch.
    kinds = ["int64" if dtype in ("int32", "uint32") else dtype for _, dtype in form]
    inputs = tuple(_input(torch, shape, kind) for (shape, _), kind in zip(form, kinds, strict=True))
    name = getattr(function, "__name__", type(function).__name__)
    with _LOCK:
        program = _program(torch, function, structure, inputs, name)
        require_no_order(torch, function, jax.tree.unflatten(structure, inputs), name)
    return _graph(torch, program, kinds)


def _input(torch: Any, shape: tuple[int, ...], kind: str) -> Any:
    """Create a tensor for tracing."""
    dtype: Any = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"PyTorch has no tensors of {kind}: convert the array first.")
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def _program(torch: Any, function: Any, structure: Any, inputs: Any, name: str) -> Any:
    """Export the program in operators of the table; raise a sentence if that is impossible."""

    class Flat(torch.nn.Module):
        def forward(self, *leaves: Any) -> Any:
            output = function(*jax.tree.unflatten(structure, leaves))
            if not isinstance(output, torch.Tensor):
                kind = type(output).__name__
                raise UserError(f"'{name}' must return one tensor, it returns {kind}.")
            return output

    try:
        with _quiet(), _watched(torch, name), torch.enable_grad():
            exported = torch.export.export(Flat(), inputs, strict=False)
            _require_graded_writes(exported, name)
            _detach_ungraded(torch, exported)
            program = _decomposed(torch, exported)
    except UserError:
        raise
    except Exception as error:  # torch.export raises many kinds
        raise UserError(_why(name, error)) from error
    _require_pure(program, name)
    for missing in _missing(program):
        raise UserError(_unknown(name, missing))
    return program


def _detach_ungraded(torch: Any, exported: Any) -> None:
    """Detach results computed under `torch.no_grad()`, which decomposition would ignore."""
    graph = exported.graph_module.graph
    blocks = [node for node in graph.nodes if "wrap_with_set_grad_enabled" in str(node.target)]
    for block in (node for node in blocks if node.args[0] is False):
        for result in list(block.users):
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, lambda user, new=detached: user is not new)


def _require_graded_writes(exported: Any, name: str) -> None:
    """Raise if a tensor is changed in place without its derivative."""
    for module in exported.graph_module.modules():
        graph = getattr(module, "graph", None)
        inner = module is not exported.graph_module  # a block under torch.no_grad()
        for node in graph.nodes if graph is not None else ():
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.is_mutable:
                continue
            base = _base(node.args[0])
            if _name(base.target) == "lift_fresh_copy":  # torch.tensor(...) inside the loss
                continue
            if "detach" in f"{node.target} {base.target}" or (inner and base.op == "placeholder"):
                raise UserError(
                    f"'{name}' changes a tensor in place without its derivative "
                    f"({_name(node.target)}): leave the tensor as it is, and use .detach() or "
                    "torch.where to make a new one."
                )


def _base(node: Any) -> Any:
    """Return the tensor that a view refers to, through views of views."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        if _name(node.target) == "detach":
            break
        node = node.args[0]
    return node


def _decomposed(torch: Any, exported: Any) -> Any:
    """Decompose the program as far as the table requires."""
    table = torch.export.default_decompositions()
    for op in [op for op in table if _name(op) in (*KEPT, *_MISTAKEN)]:
        table.pop(op)
    every = torch._decomp.decomposition_table
    rules = {op: rule for op, rule in every.items() if _name(op) not in _MISTAKEN}
    program = exported.run_decompositions(table)
    while more := {op: rules[op] for op in _missing(program) if op in rules and op not in table}:
        table.update(more)  # operators outside the core that torch can decompose further
        program = exported.run_decompositions(table)
    return program


def _missing(program: Any) -> list[Any]:
    """Return the operators of a program that are not in the table."""
    targets = dict.fromkeys(n.target for n in program.graph.nodes if n.op == "call_function")
    return [op for op in targets if _name(op) not in TABLE and _name(op) not in _SILENT]


def _name(op: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    if op is operator.getitem:
        return "getitem"
    packet, overload = getattr(op, "overloadpacket", None), getattr(op, "_overloadname", "")
    keep_overload = packet is None or overload in _UNLIKE
    return str(op if keep_overload else packet).removeprefix("aten.")


def _graph(torch: Any, program: Any, kinds: list[str]) -> Graph:
    """Convert a program to a graph, with every type conversion as an operator of its own."""
    values: dict[Any, Value] = {}
    constants: list[np.ndarray] = []
    stored = {**program.state_dict, **program.constants}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    indices = iter(range(len(kinds)))
    for node, spec in zip(placeholders, specs, strict=True):
        if spec.kind.name == "USER_INPUT":
            values[node] = Value(next(indices))
        else:
            constants.append(constant(stored[spec.target]))
            values[node] = Value(len(kinds) + len(constants) - 1)
    nodes = _Nodes(torch, values, len(kinds) + len(constants))
    for node in program.graph.nodes:
        if node.op == "call_function" and _name(node.target) not in _SILENT:
            nodes.add(node)
    (output,) = next(node for node in program.graph.nodes if node.op == "output").args[0]
    return Graph(kinds, constants, nodes.found, values[output])


def constant(tensor: Any) -> np.ndarray:
    """Copy a tensor to an array."""
    try:
        return tensor.detach().cpu().numpy().copy()
    except TypeError:
        raise UserError(
            f"NumPy does not know the type {tensor.dtype}: call .float() on the module."
        ) from None


class _Nodes:
    """Collects the nodes of a graph from a program."""

    def __init__(self, torch: Any, values: dict[Any, Value], first: int) -> None:
        self._torch, self._values, self._first = torch, values, first
        self.found: list[Node] = []

    def add(self, node: Any) -> None:
        """Append an operator, preceded by conversions of its arguments' types."""
        name = _name(node.target)
        arguments = [self._argument(argument) for argument in node.args]
        options = {
            key: self._argument(argument)
            for key, argument in node.kwargs.items()
            if key not in _DROPPED
        }
        if name in ELEMENTWISE:
            first = 1 if name == "where" else 0  # a mask keeps its type
            kind = self._common(node, node.args[first:])
            for i in range(first, len(node.args)):
                arguments[i] = self._cast(node.args[i], arguments[i], kind)
        if name == "cat":
            parts = zip(node.args[0], arguments[0], strict=True)
            arguments[0] = [self._cast(*pair, node.meta["val"].dtype) for pair in parts]
        if name in _TYPED:
            options["dtype"] = _dtype(node.meta["val"].dtype)
        self._values[node] = self._append(Node(name, arguments, options))

    def _append(self, node: Node) -> Value:
        self.found.append(node)
        return Value(self._first + len(self.found) - 1)

    def _argument(self, argument: Any) -> Any:
        """Convert an argument from PyTorch."""
        if isinstance(argument, self._torch.fx.Node):
            return self._values[argument]
        if isinstance(argument, self._torch.dtype):
            return _dtype(argument)
        if isinstance(argument, list | tuple):
            return [self._argument(item) for item in argument]
        return argument

    def _common(self, node: Any, operands: Any) -> Any:
        """Return the type in which an operator computes: of its result, or of compared operands."""
        result = node.meta["val"]
        dtype = (result[0] if isinstance(result, tuple | list) else result).dtype
        if dtype != self._torch.bool:
            return dtype
        metas = [
            operand.meta["val"] if hasattr(operand, "meta") else operand for operand in operands
        ]
        metas = [operand for operand in metas if operand is not None]
        if len(metas) == 2:
            return self._torch.result_type(*metas)
        return metas[0].dtype

    def _cast(self, source: Any, argument: Any, kind: Any) -> Any:
        """Convert an argument to the given type."""
        if not isinstance(argument, Value) or source.meta["val"].dtype == kind:
            return argument
        return self._append(Node("_to_copy", [argument], {"dtype": _dtype(kind)}))


def _dtype(kind: Any) -> Dtype:
    return Dtype(str(kind).removeprefix("torch."))


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Suppress the output, logs and warnings of torch.export."""
    before, output = logging.root.manager.disable, io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
    print(output.getvalue(), end="")  # without an error, only the loss itself has printed


@contextlib.contextmanager
def _watched(torch: Any, name: str) -> Generator[None]:
    """Raise if a loss uses a feature that a graph cannot represent."""
    thread = threading.get_ident()  # other threads are not affected

    def check_mode(module: Any, inputs: Any) -> None:
        if (
            threading.get_ident() == thread
            and module.training
            and (reason := _trains(torch, module))
        ):
            raise UserError(
                f"'{name}' calls {type(module).__name__} in training mode, which {reason}: call "
                ".eval() on the module first."
            )

    def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return apply.__get__(None, function)(*args, **kwargs)
        raise UserError(
            f"'{name}' calls {function.__name__}, an autograd.Function with a backward of its own, "
            "which a graph cannot hold: write it with .detach()."
        )

    def no_inference(mode: Any) -> Any:
        if threading.get_ident() != thread or not mode.mode:  # torch.export switches it off
            return enter(mode)
        raise UserError(f"'{name}' uses torch.inference_mode(): use torch.no_grad() instead.")

    hook = torch.nn.modules.module.register_module_forward_pre_hook(check_mode)
    enter = torch.inference_mode.__enter__
    apply = torch.autograd.Function.__dict__["apply"]
    torch.autograd.Function.apply = classmethod(refuse)
    torch.inference_mode.__enter__ = no_inference
    try:
        with differentiable_attention(torch):
            yield
    finally:
        torch.autograd.Function.apply = apply
        torch.inference_mode.__enter__ = enter
        hook.remove()


@contextlib.contextmanager
def differentiable_attention(torch: Any) -> Generator[None]:
    """Make transformers in evaluation mode use operators with derivatives."""
    fast, kernels = torch.backends.mha.get_fastpath_enabled(), torch.nn.attention
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with kernels.sdpa_kernel(kernels.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _trains(torch: Any, module: Any) -> str | None:
    """Return the reason why a module in training mode cannot be part of a loss, if any."""
    nn = torch.nn
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return "draws random numbers"
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
        return "draws random numbers"
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "couples the samples of a batch and changes its running means"
    return None


def _require_pure(program: Any, name: str) -> None:
    """Raise unless a program returns one tensor and has no side effects."""
    kinds = [spec.kind.name for spec in program.graph_signature.output_specs]
    if any("MUTATION" in kind for kind in kinds):
        raise UserError(
            f"'{name}' changes a buffer or an input: call .eval() on its modules, and leave out "
            "in-place operations on arguments."
        )
    if kinds != ["USER_OUTPUT"]:
        raise UserError(f"'{name}' does more than to return one tensor: {', '.join(kinds)}.")


def _unknown(name: str, op: Any) -> str:
    """Return the message for an operator that is not in the table."""
    operator_name = _name(op)
    if any(word in operator_name for word in _RANDOM):
        return (
            f"'{name}' draws random numbers ({operator_name}): call .eval() on modules with "
            "dropout, and draw nothing in a loss."
        )
    if operator_name.startswith("sym_") or operator_name == "_local_scalar_dense":
        return _depends(name)
    return (
        f"'{name}' uses PyTorch's operator {plain(operator_name)}, which has no JAX counterpart "
        "here: write that part with other operators, or the loss in JAX."
    )


def _depends(name: str) -> str:
    return (
        f"'{name}' depends on values of tensors in its control flow (if, .item(), boolean "
        "indexing): use torch.where, or weights of zero and one."
    )


def _why(name: str, error: Exception) -> str:
    """Return the message for an error of torch.export."""
    text = str(error).strip()
    if "data-dependent" in text or "DataDependent" in type(error).__name__:
        return _depends(name)
    if "found a fake tensor" in text:
        return f"'{name}' takes .data of a tensor or keeps one outside: use .detach() instead."
    if "leaf Variable that requires grad" in text:
        return f"'{name}' changes an argument in place: work on a copy (.clone())."
    if "Autograd not support dtype" in text:
        return f"'{name}' multiplies whole numbers by weights: convert its inputs with .float()."
    if "is mutated in the forward" in text:
        return f"'{name}' changes a buffer of its module: call .eval() on the module first."
    first = text.splitlines()[0] if text else type(error).__name__
    return f"'{name}' cannot be traced by torch.export: {plain(first, 200)}"
