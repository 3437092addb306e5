"""Compares the machine code of two builds kernel by kernel: after a change of names or comments it is the same.

    git switch OLD && python -m openinfer_kernels.cubins --architecture sm_90a --out /tmp/old
    git switch NEW && python tools/device/compare_sass.py /tmp/old --architecture sm_90a --table sass.json

The second build is the checkout's own, compiled where the cache does not have it. Compared is everything that runs of a
kernel, byte by byte: instructions with their control bits, constants, relocations, registers, stack, shared memory; not
names, line information, symbols, nor where sections lie in the file. A kernel without a namesake is compared with those
of the other build that have none either, whatever their name and source (`renamed`). Both builds need one compiler;
no disassembler is needed. Exits with 1 if a kernel differs, is gone or is new.
"""

import argparse
import hashlib
import json
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from openinfer_kernels.cubins import ARCHITECTURES, require_cubins

_NOBITS, _RELOCATIONS, _SIZED = 8, {4: "<QQq", 9: "<QQ"}, 4
_CODE = ".text."
_WITH_KERNEL = (".nv.constant", ".nv.shared.", ".rel.text.", ".rela.text.", ".rel.nv.constant", ".rela.nv.constant")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What runs of one kernel."""

    stem: str
    name: str
    digest: str
    num_instructions: int

    @property
    def label(self) -> str:
        """For the table."""
        return f"{self.stem}:{self.name}"


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    content: bytes
    size: int
    link: int


def kernels_of(path: Path, stem: str) -> list[Kernel]:
    """The kernels of a cubin, by name."""
    sections = _sections(path.read_bytes())
    resources = _resources(sections)
    names = [section.name.removeprefix(_CODE) for section in sections if section.name.startswith(_CODE)]
    return [_kernel(sections, resources.get(name, []), stem, name) for name in sorted(names)]


def _kernel(sections: list[_Section], resources: list[tuple[int, bytes]], stem: str, name: str) -> Kernel:
    digest, num_instructions = hashlib.sha256(repr(resources).encode()), 0
    for section in sections:
        is_code = section.name == _CODE + name
        if not (is_code or (section.name.startswith(_WITH_KERNEL) and section.name.endswith("." + name))):
            continue
        content = _targets(section) if section.kind in _RELOCATIONS else section.content
        what = section.name.removesuffix(name)
        digest.update(f"{what}|{section.size}|{len(content)}|".encode() + content)
        num_instructions += len(content) // 16 if is_code else 0
    return Kernel(stem, name, digest.hexdigest()[:16], num_instructions)


def _resources(sections: list[_Section]) -> dict[str, list[tuple[int, bytes]]]:
    """Registers, frames and stacks of functions: the file's attributes whose value begins with a symbol's number."""
    symbols = next(section for section in sections if section.name == ".symtab")
    strings = sections[symbols.link].content
    names_at = [entry[0] for entry in struct.iter_unpack("<IBBHQQ", symbols.content)]
    found: dict[str, list[tuple[int, bytes]]] = {}
    attributes = next(section.content for section in sections if section.name == ".nv.info")
    at = 0
    while at < len(attributes):
        form, attribute, size = struct.unpack_from("<BBH", attributes, at)
        at += 4
        if form != _SIZED:
            continue
        value, at = attributes[at : at + size], at + size
        if size == 8:
            name_at = names_at[struct.unpack_from("<I", value)[0]]
            name = strings[name_at : strings.index(b"\0", name_at)].decode()
            found.setdefault(name, []).append((attribute, value[4:]))
    return {name: sorted(values) for name, values in found.items()}


def _targets(section: _Section) -> bytes:
    """Places and kinds of relocations, without the symbols, whose names and order may change."""
    form = _RELOCATIONS[section.kind]
    entries = struct.iter_unpack(form, section.content)
    return repr(sorted((at, what & 0xFFFFFFFF, *more) for at, what, *more in entries)).encode()


def _sections(elf: bytes) -> list[_Section]:
    table, names_index = struct.unpack_from("<Q", elf, 0x28)[0], struct.unpack_from("<H", elf, 0x3E)[0]
    count = struct.unpack_from("<H", elf, 0x3C)[0]
    raw = [struct.unpack_from("<IIQQQQIIQQ", elf, table + 64 * i) for i in range(count)]
    names_at = raw[names_index][4]
    found: list[_Section] = []
    for name_at, kind, _, _, offset, size, link, _, _, _ in raw:
        name = elf[names_at + name_at : elf.index(b"\0", names_at + name_at)].decode()
        content = b"" if kind == _NOBITS else elf[offset : offset + size]
        found.append(_Section(name, kind, content, size, link))
    return found


def compare(old: list[Kernel], new: list[Kernel]) -> dict[str, list[str]]:
    """Labels of kernels by what became of them; all is well if only `identical` and `renamed` have some."""
    before, after = {each.label: each for each in old}, {each.label: each for each in new}
    table: dict[str, list[str]] = {"identical": [], "renamed": [], "differs": [], "gone": [], "new": []}
    for label in sorted(before.keys() & after.keys()):
        table["identical" if before[label].digest == after[label].digest else "differs"].append(label)
    unmatched = {label: after[label] for label in sorted(after.keys() - before.keys())}
    for label in sorted(before.keys() - after.keys()):
        same = next((each for each in unmatched.values() if each.digest == before[label].digest), None)
        if same is None:
            table["gone"].append(label)
        else:
            table["renamed"].append(f"{label} -> {same.label}")
            del unmatched[same.label]
    table["new"] = list(unmatched)
    return table


def main() -> int:
    """1 where kernels differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder with the cubins of the other commit")
    parser.add_argument("--architecture", action="append", choices=ARCHITECTURES, required=True, help="may be repeated")
    parser.add_argument("--table", type=Path, help="JSON file for the whole table")
    options = parser.parse_args()
    tables: dict[str, dict[str, object]] = {}
    is_same = True
    for architecture in options.architecture:
        old_paths = {path.name.split(".")[0]: path for path in sorted(options.old.glob(f"*.{architecture}.*cubin"))}
        old = [kernel for stem, path in old_paths.items() for kernel in kernels_of(path, stem)]
        new = [kernel for stem, path in require_cubins(architecture).items() for kernel in kernels_of(path, stem)]
        table = compare(old, new)
        failures = table["differs"] + table["gone"] + table["new"]
        is_same = is_same and bool(old) and not failures
        counts = {what: len(labels) for what, labels in table.items()}
        counts["instructions"] = sum(each.num_instructions for each in new)
        print(architecture, " ".join(f"{what} {count}" for what, count in counts.items()))
        print("".join(f"  {what}: {label}\n" for what in ("differs", "gone", "new") for label in table[what]), end="")
        digests = {each.label: each.digest for each in new}
        tables[architecture] = {
            "counts": counts,
            **table,
            "identical": {each: digests[each] for each in table["identical"]},
        }
    if options.table is not None:
        options.table.write_text(json.dumps(tables, indent=1) + "\n")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
