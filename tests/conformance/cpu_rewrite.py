"""Rewrite tests that ask for GPUs, as they are imported, so that they run on the CPU over gloo.

Most of PyTorch's DDP tests are about DDP and not about GPUs: they move a module to `cuda(rank)` because that is
where modules usually are. Their syntax tree is changed before it is compiled:

- decorators that skip without GPUs or NCCL are dropped;
- what names a device or moves something to one (`x.cuda()`, `x.to(...)`, `torch.device(...)`, `device=...`,
  `torch.cuda.*`, `torch.accelerator.*`) is replaced by a name of `cpu_stand_ins`;
- process groups that ask for "nccl" get "gloo".

Only test modules are changed, no library. A test that needs a real GPU fails with torch's own class too, and so
is never counted against another.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

STAND_INS = "_cpu_stand_ins"

_ASKS_FOR_GPUS = frozenset(
    {
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "requires_accelerator_dist_backend",
        "requires_cuda",
        "requires_nccl",
        "requires_nccl_version",
        "skipIfRocm",
        "skip_if_lt_x_gpu",
        "skip_if_no_gpu",
        "skip_if_rocm_arch_multiprocess",
        "skip_if_rocm_multiprocess",
    }
)
_SKIPS_CONDITIONALLY = frozenset({"skipIf", "skip_but_pass_in_sandcastle", "skip_but_pass_in_sandcastle_if"})
_CONDITIONS_ON_GPUS = ("IS_LINUX", "HAS_GPU", "TEST_CUDA", "TEST_MULTIGPU", "TEST_WITH_ROCM")
_MAKES_A_GROUP = frozenset({"init_process_group", "new_group"})

# Convolutions over images of 1000 x 1000 keep a CPU core busy for minutes.
_LARGE_IMAGE, _SMALL_IMAGE = "dim = 1000", 64


class OnCpu(ast.NodeTransformer):
    """The rewriting of one file's tree."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        preamble = sum(1 for _ in _preamble(node))
        node.body.insert(preamble, ast.parse(f"import tests.conformance.cpu_stand_ins as {STAND_INS}").body[0])
        return ast.fix_missing_locations(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if not _demands_gpus(each)]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if not _demands_gpus(each)]
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if ast.unparse(node) == _LARGE_IMAGE:
            node.value = ast.Constant(_SMALL_IMAGE)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda` and `torch.accelerator`, so that everything in them is found in the stand-ins."""
        self.generic_visit(node)
        if _is_torch(node.value) and node.attr in ("cuda", "accelerator"):
            return _stand_in(node.attr + "_module")
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _called_name(node)
        if name in _MAKES_A_GROUP:
            node.args = [_gloo_for_nccl(arg) for arg in node.args]
        for keyword in node.keywords:
            _lead_to_cpu(keyword, name)
        if isinstance(node.func, ast.Attribute):
            of_torch = _is_torch(node.func.value)
            if of_torch and name == "device":
                node.func = _stand_in("device")
            elif not of_torch and name in ("cuda", "to"):
                node.args.insert(0, node.func.value)
                node.func = _stand_in(f"{name}_method")
        return self.generic_visit(node)


def _preamble(module: ast.Module) -> Iterator[ast.stmt]:
    """The statements that have to stay first: the docstring and imports from `__future__`."""
    for node in module.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return
        yield node


def _demands_gpus(decorator: ast.expr) -> bool:
    name = _called_name(decorator) if isinstance(decorator, ast.Call) else _last_name(decorator)
    if name in _SKIPS_CONDITIONALLY:
        condition = ast.unparse(decorator)
        return any(word in condition for word in _CONDITIONS_ON_GPUS)
    return name in _ASKS_FOR_GPUS


def _lead_to_cpu(keyword: ast.keyword, called: str) -> None:
    if keyword.arg == "backend":
        keyword.value = _gloo_for_nccl(keyword.value)
    elif keyword.arg in ("device", "default_device") or (keyword.arg == "device_id" and called == "replicate"):
        keyword.value = ast.Call(_stand_in("on_cpu"), [keyword.value], [])


def _gloo_for_nccl(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Constant) and node.value == "nccl":
        return ast.copy_location(ast.Constant("gloo"), node)
    return node


def _called_name(call: ast.Call) -> str:
    return _last_name(call.func)


def _last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, `c` of `c`, and nothing of anything else."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _stand_in(name: str) -> ast.Attribute:
    return ast.Attribute(ast.Name(STAND_INS, ast.Load()), name, ast.Load())


# ------------------------------------------------------------------ at import


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        """From the source, always: a cached compilation would be of the tests as they were."""
        return self.source_to_code(self.get_data(self.path), self.path)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        tree = OnCpu().visit(ast.parse(data, path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder:
    """Finds the named modules as usual, and gives them the rewriting loader."""

    def __init__(self, names: Collection[str]):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _RewritingLoader(name, spec.loader.path)
        return spec


def rewrite_when_imported(names: Collection[str]) -> None:
    """From now on in this process, modules with these full names are rewritten as they are imported."""
    sys.meta_path.insert(0, _Finder(names))
