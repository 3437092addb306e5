"""Which variables a template reads that it has not set before: what can be said to it.

`jinja2.meta.find_undeclared_variables` also names variables that are set in one branch and read further down in it.
"""

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeVisitor

_OF_LOOPS = {"loop"}
_OF_MACROS = {"caller", "kwargs", "varargs"}
Names = set[str]


def names_read(tree: nodes.Template) -> frozenset[str]:
    """Names that are looked up where the template need not have set them, globals too."""
    reads = _Reads()
    reads.through(tree.body, set())
    return frozenset(reads.found)


class _Reads(NodeVisitor):
    """Follows the template in its order; each node is given the names that are certainly set, and adds its own."""

    def __init__(self) -> None:
        self.found: Names = set()

    def through(self, several: Iterable[nodes.Node | None], known: Names) -> Names:
        for node in several:
            if node is not None:
                self.visit(node, known)
        return known

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> None:
        del kwargs
        (known,) = args
        inner = known if isinstance(node, nodes.Expr | nodes.Output | nodes.ExprStmt) else set(known)
        self.through(node.iter_child_nodes(), inner)

    def visit_Name(self, node: nodes.Name, known: Names) -> None:  # noqa: N802 - jinja2's names
        if node.ctx == "load" and node.name not in known:
            self.found.add(node.name)

    def visit_Assign(self, node: nodes.Assign, known: Names) -> None:  # noqa: N802
        self.visit(node.node, known)
        known |= _targets(node.target)

    def visit_AssignBlock(self, node: nodes.AssignBlock, known: Names) -> None:  # noqa: N802
        self.through([node.filter, *node.body], set(known))
        known |= _targets(node.target)

    def visit_If(self, node: nodes.If, known: Names) -> None:  # noqa: N802
        self.visit(node.test, known)
        branches: list[Names] = [self.through(node.body, set(known))]
        for other in node.elif_:
            self.visit(other.test, known)
            branches.append(self.through(other.body, set(known)))
        branches.append(self.through(node.else_, set(known)))
        known |= branches[0].intersection(*branches[1:])

    def visit_For(self, node: nodes.For, known: Names) -> None:  # noqa: N802
        self.visit(node.iter, known)
        inside = known | _targets(node.target)
        self.through([node.test], set(inside))
        self.through(node.body, inside | _OF_LOOPS)
        self.through(node.else_, set(known))

    def visit_Macro(self, node: nodes.Macro, known: Names) -> None:  # noqa: N802
        known.add(node.name)
        self.through(node.defaults, known)
        self.through(node.body, known | _OF_MACROS | {argument.name for argument in node.args})

    def visit_CallBlock(self, node: nodes.CallBlock, known: Names) -> None:  # noqa: N802
        self.through([node.call, *node.defaults], known)
        self.through(node.body, known | {argument.name for argument in node.args})

    def visit_With(self, node: nodes.With, known: Names) -> None:  # noqa: N802
        self.through(node.values, known)
        self.through(node.body, known.union(*map(_targets, node.targets)))


def _targets(node: nodes.Node) -> Names:
    return {name.name for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}
