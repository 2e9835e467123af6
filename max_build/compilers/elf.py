"""What the machine code in an artifact says about itself: architecture, kernels, resources.

Follows the ELF-64 specification (System V gABI, chapters 4 and 5), little-endian only. NVIDIA
publishes no description of a cubin, so what is specific to it was read off cubins made by the
tools of CUDA 12.4 to 13.5 and is checked against `cuobjdump` by the tests:

- `EI_ABIVERSION` 7 (tools up to 12.9, sm_90 and older): `e_flags` bits 0-7 hold the number of the
  architecture and bit 11 its `a` suffix.
- `EI_ABIVERSION` 8: bits 8-15 hold the number. The `a` suffix is bit 3 (tools 12.8 and 12.9) or
  attribute 9 of `.nv.compat` (tools 13). The `f` suffix leaves no trace but the `-arch` that
  ptxas notes in `.note.nv.tkinfo`: the code of sm_100f is the code of sm_100.
- `.nv.info` is a list of (format, attribute, value) with one register count and one stack size
  per function; sections named after a kernel hold its code, constant banks, shared and local
  memory.

Written with `struct` and not with `pyelftools`: a MEF holds about a hundred device ELFs and all
of them are read on every publish, damaged input must end in one kind of error within a bounded
time, and neither the notes nor `.nv.info` are known to that library.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from max_build.errors import CompileError

__all__ = [
    "AARCH64",
    "AMDGPU",
    "CUDA",
    "X86_64",
    "Cubin",
    "Image",
    "Kernel",
    "check_cubin",
    "check_mef",
    "mef_architectures",
    "read_cubin",
    "read_mef",
]

X86_64: Final = 62
AARCH64: Final = 183
CUDA: Final = 190
AMDGPU: Final = 224
"""`e_machine` of the four kinds of code an artifact may hold."""

_MAGIC: Final = b"\x7fELF\x02\x01\x01"  # 64-bit, little-endian, version 1
_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SEGMENT: Final = struct.Struct("<IIQQQQQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_NOTE: Final = struct.Struct("<III")
_ATTRIBUTE: Final = struct.Struct("<BBH")

_SHT_SYMTAB, _SHT_NOTE, _SHT_NOBITS, _SHT_DYNSYM = 2, 7, 8, 11
_SHF_EXECINSTR: Final = 4
_ET_EXEC: Final = 2
_STT_FUNC: Final = 2
_STB_LOCAL: Final = 0
_EIFMT_SVAL: Final = 4  # the only format whose value follows the four-byte head
_EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE, _EIATTR_REGCOUNT = 0x11, 0x12, 0x2F
_EICOMPAT_ACCELERATOR: Final = 0x09
_NT_AMDGPU_METADATA: Final = 32
_UNKNOWN_STACK: Final = 0xFFFF_FFFF  # what ptxas writes for recursion
_ARCH_OPTION: Final = re.compile(rb"-arch[= ](sm_\d+[af]?)\b")
_LONGEST_NAME: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry point. Sizes in bytes; registers and stack are per thread, shared per block.

    Spilled registers are part of the stack: no cubin tells them apart. `stack_bytes` is None
    where a recursion leaves it unknown. `constants` maps a bank to its bytes; bank 0 holds the
    parameters.
    """

    name: str
    registers: int
    shared_bytes: int
    local_bytes: int
    stack_bytes: int | None
    code_bytes: int
    constants: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cubin:
    """A CUDA ELF: its exact architecture (`sm_90a`), and its kernels in order of name."""

    arch: str
    kernels: tuple[Kernel, ...]
    constants: dict[int, int]
    global_bytes: int
    executable: bool
    size: int

    @property
    def entry_points(self) -> tuple[str, ...]:
        """Lowered names of the kernels, sorted."""
        return tuple(kernel.name for kernel in self.kernels)


@dataclass(frozen=True, slots=True)
class Image:
    """One ELF inside a MEF: `offset` and `size` in bytes, `e_machine`, and its architecture.

    `arch` is `sm_NN[af]`, `gfxNNN`, or `x86-64` / `aarch64` for host code. `kernels` is empty for
    host code.
    """

    offset: int
    size: int
    machine: int
    arch: str
    kernels: tuple[Kernel, ...] = ()


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


class _Symbol(NamedTuple):
    name: int
    kind: int
    binding: int
    section: int
    size: int


class _Elf:
    """The headers of the ELF at `base` in `data`, every offset checked against the end.

    Only what is asked for is read, and in time linear in the size of the ELF.
    """

    def __init__(self, data: bytes, base: int = 0, end: int | None = None) -> None:
        self.data = data
        self.base = base
        self.limit = (len(data) if end is None else end) - base
        if not data:
            raise _Damaged("is empty")
        if data[base : base + 4] != b"\x7fELF":
            message = (
                f"is not an ELF file: starts with {bytes(data[base : base + 8])!r}"
            )
            raise _Damaged(message)
        if data[base : base + 7] != _MAGIC:
            raise _Damaged("is not a 64-bit little-endian ELF of version 1")
        if self.limit < _HEADER.size:
            raise _Damaged(
                f"is truncated: {self.limit} bytes, and the header takes {_HEADER.size}"
            )
        (
            ident, self.type, self.machine, version, _entry, phoff, shoff, self.flags,
            ehsize, phentsize, phnum, shentsize, shnum, self._shstrndx,
        ) = _HEADER.unpack_from(data, base)  # fmt: skip
        self.abi = ident[8]
        # Tools up to 12.9 write their own version (such as 129) in place of EV_CURRENT.
        if not version or ehsize != _HEADER.size:
            raise _Damaged(f"has a damaged header: version {version}, {ehsize} bytes")
        if shnum and shentsize != _SECTION.size:
            raise _Damaged(f"has a damaged header: sections of {shentsize} bytes")
        if phnum and phentsize != _SEGMENT.size:
            raise _Damaged(f"has a damaged header: segments of {phentsize} bytes")
        self.extent = max(
            self._inside("segment table", phoff if phnum else 0, phnum * _SEGMENT.size),
            self._inside("section table", shoff if shnum else 0, shnum * _SECTION.size),
            _HEADER.size,
        )
        self.sections = [
            _Section(name, kind, flags, offset, size, link, info)
            for name, kind, flags, _addr, offset, size, link, info, _align, _entsize in (
                _SECTION.iter_unpack(
                    data[base + shoff : base + shoff + shnum * _SECTION.size]
                )
            )
        ]
        for index, section in enumerate(self.sections):
            if section.kind not in (0, _SHT_NOBITS):
                stop = self._inside(f"section {index}", section.offset, section.size)
                self.extent = max(self.extent, stop)
        for index in range(phnum):
            _, _, offset, _, _, filesz, _, _ = _SEGMENT.unpack_from(
                data, base + phoff + index * _SEGMENT.size
            )
            self.extent = max(
                self.extent, self._inside(f"segment {index}", offset, filesz)
            )
        # Names may share bytes, so a damaged table could spell one long name a thousand times.
        self._name_budget = 8 * self.extent + _LONGEST_NAME

    def _inside(self, what: str, offset: int, size: int) -> int:
        if offset + size > self.limit:
            message = (
                f"is truncated or damaged: its {what} ends at byte {offset + size}, "
                f"the data at byte {self.limit}"
            )
            raise _Damaged(message)
        return offset + size

    def content(self, section: _Section) -> bytes:
        if section.kind == _SHT_NOBITS:
            return b""
        start = self.base + section.offset
        return bytes(self.data[start : start + section.size])

    def name(self, table: int, offset: int) -> str:
        """The string at `offset` of the string table in section `table`."""
        if table >= len(self.sections):
            raise _Damaged(
                f"is damaged: string table {table} of {len(self.sections)} sections"
            )
        strings = self.sections[table]
        start = self.base + strings.offset + offset
        stop = self.base + strings.offset + strings.size
        end = self.data.find(b"\0", start, min(stop, start + _LONGEST_NAME))
        if strings.kind == _SHT_NOBITS or not start <= end < stop:
            raise _Damaged(
                f"is damaged: no name at byte {offset} of string table {table}"
            )
        self._name_budget -= end - start
        if self._name_budget < 0:
            raise _Damaged("is damaged: more names than it has bytes for")
        return str(self.data[start:end], "utf-8", "backslashreplace")

    def section_names(self) -> list[str]:
        if not self.sections:
            return []
        return [self.name(self._shstrndx, section.name) for section in self.sections]

    def symbols(self, kind: int) -> Iterator[tuple[_Symbol, int]]:
        """Yield each symbol of the first table of that kind, with its string table."""
        table = next(
            (section for section in self.sections if section.kind == kind), None
        )
        if table is None:
            return
        whole = table.size - table.size % _SYMBOL.size
        for name, info, _other, index, _value, size in _SYMBOL.iter_unpack(
            self.content(table)[:whole]
        ):
            yield _Symbol(name, info & 15, info >> 4, index, size), table.link

    def notes(self, section: _Section) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield owner, type and description of each note."""
        data = self.content(section)
        at = 0
        while at + _NOTE.size <= len(data):
            namesz, descsz, kind = _NOTE.unpack_from(data, at)
            owner = at + _NOTE.size
            description = owner + (namesz + 3 & ~3)
            at = description + (descsz + 3 & ~3)
            if description + descsz > len(data):
                raise _Damaged("is damaged: a note passes the end of its section")
            yield (
                data[owner : owner + namesz].rstrip(b"\0"),
                kind,
                data[description : description + descsz],
            )


class _Damaged(Exception):
    """What is wrong with an ELF; its caller says which."""


def read_cubin(data: bytes) -> Cubin:
    """Read one cubin.

    Raises
    ------
    CompileError
        The bytes are no CUDA ELF, or a truncated or damaged one.
    """
    try:
        elf = _Elf(data)
        if elf.machine != CUDA:
            raise _Damaged(
                f"is code for another machine: e_machine {elf.machine}, not {CUDA}"
            )
        return _cubin(elf)
    except _Damaged as damage:
        message = f"the cubin {damage}"
        raise CompileError(message) from None


def check_cubin(data: bytes, target: str, entry_points: Iterable[str] = ()) -> Cubin:
    """Check that a compiler's answer is a whole cubin for exactly `target`; return what it is.

    Parameters
    ----------
    data
        The cubin.
    target
        The architecture with its suffix, such as `sm_90a`. Nothing but it is accepted.
    entry_points
        Lowered names that were promised; others may be there as well.

    Raises
    ------
    CompileError
        The bytes are no whole CUDA ELF, are not executable, are for another architecture, hold no
        kernel, or lack a promised one.
    """
    cubin = read_cubin(data)
    if cubin.arch != target:
        message = f"the cubin holds code for `{cubin.arch}`, not for `{target}`"
        raise CompileError(message)
    if not cubin.executable:
        message = "the cubin is relocatable: it was compiled but not linked"
        raise CompileError(message)
    if not cubin.kernels:
        message = "the cubin holds no kernel"
        raise CompileError(
            message,
            hint="declare one `__global__`; name the instances of a template in `names`",
        )
    missing = sorted(set(entry_points) - set(cubin.entry_points))
    if missing:
        listing = ", ".join(f"`{name}`" for name in missing)
        found = ", ".join(f"`{name}`" for name in cubin.entry_points)
        message = f"the cubin lacks the entry point {listing}; it has {found}"
        raise CompileError(message)
    return cubin


def read_mef(data: bytes) -> tuple[Image, ...]:
    """Find every ELF in a MEF, in order of offset.

    The container has no public description. Host code lies in it whole, and device code lies
    whole in the read-only data of the host code, so an ELF is found by its magic and its end by
    its own tables.

    Raises
    ------
    CompileError
        An ELF in it is truncated or damaged, or is for a machine no artifact may hold.
    """
    images: list[Image] = []
    host_end = 0
    at = data.find(_MAGIC)
    while at >= 0:
        try:
            elf = _Elf(data, at)
            if elf.machine == CUDA:
                cubin = _cubin(elf)
                images.append(Image(at, elf.extent, CUDA, cubin.arch, cubin.kernels))
                at += elf.extent
            elif elf.machine == AMDGPU:
                arch, kernels = _code_object(elf)
                images.append(Image(at, elf.extent, AMDGPU, arch, kernels))
                at += elf.extent
            elif elf.machine in (X86_64, AARCH64):
                if at < host_end:
                    raise _Damaged("is host code inside host code")
                host_end = at + elf.extent
                arch = "x86-64" if elf.machine == X86_64 else "aarch64"
                images.append(Image(at, elf.extent, elf.machine, arch))
                at += _HEADER.size  # device code lies inside it
            else:
                raise _Damaged(
                    f"is code for an unexpected machine: e_machine {elf.machine}"
                )
        except _Damaged as damage:
            message = f"the ELF at byte {at} of the MEF {damage}"
            raise CompileError(message) from None
        at = data.find(_MAGIC, at)
    return tuple(images)


def mef_architectures(target: str) -> frozenset[str]:
    """Architectures that the device code of a MEF for `target` may have.

    The target itself, and one tolerance: MAX 26.7.0 compiles a plain `sm_NN` from sm_90 on with
    the instructions of `sm_NNa` (seen for sm_90, sm_100 and sm_120), so that code is accepted for
    that target. It still runs on that one architecture only: choose a device by `Image.arch`, not
    by the target.
    """
    found = re.fullmatch(r"sm_(\d+)", target)
    if found and int(found[1]) >= 90:
        return frozenset((target, f"{target}a"))
    return frozenset((target,)) if target != "cpu" else frozenset()


def check_mef(data: bytes, target: str) -> tuple[Image, ...]:
    """Check that a MEF holds host code, and device code for `target` alone; return its ELFs.

    `cpu` allows no device code. A graph for a GPU may have none either, where each of its kernels
    comes from a vendor's library. `mef_architectures` states the one tolerance.

    Raises
    ------
    CompileError
        The MEF is empty, holds no host code or a damaged ELF, or device code for something else.
    """
    if not data:
        message = "the MEF is empty"
        raise CompileError(message)
    images = read_mef(data)
    device = [image for image in images if image.machine in (CUDA, AMDGPU)]
    if len(device) == len(images):
        message = "the MEF holds no host code"
        raise CompileError(message)
    accepted = mef_architectures(target)
    foreign = [image for image in device if image.arch not in accepted]
    if foreign:
        found = ", ".join(
            f"`{arch}`" for arch in sorted({image.arch for image in foreign})
        )
        message = (
            f"the MEF for `{target}` holds {len(foreign)} of {len(device)} device images for "
            f"{found}, the first at byte {foreign[0].offset}"
        )
        raise CompileError(message)
    return images


def _cubin(elf: _Elf) -> Cubin:
    names = elf.section_names()
    sizes = dict(zip(names, (section.size for section in elf.sections), strict=True))
    by_name = dict(zip(names, elf.sections, strict=True))
    registers, frames, stacks = _function_attributes(elf, by_name.get(".nv.info"))
    kernels = []
    for index, (symbol, strings) in enumerate(elf.symbols(_SHT_SYMTAB)):
        if symbol.kind != _STT_FUNC or symbol.binding == _STB_LOCAL:
            continue
        name = elf.name(strings, symbol.name)
        code = by_name.get(f".text.{name}")
        # A device function has code of its own but no bank of parameters.
        if code is None or f".nv.constant0.{name}" not in by_name:
            continue
        stack = stacks.get(index, frames.get(index, 0))
        kernels.append(
            Kernel(
                name=name,
                registers=registers.get(index, code.info >> 24),
                shared_bytes=sizes.get(f".nv.shared.{name}", 0),
                local_bytes=sizes.get(f".nv.local.{name}", 0),
                stack_bytes=None if stack == _UNKNOWN_STACK else stack,
                code_bytes=code.size,
                constants=_banks(sizes, f".{name}"),
            )
        )
    return Cubin(
        arch=_cuda_arch(elf, by_name),
        kernels=tuple(sorted(kernels, key=lambda kernel: kernel.name)),
        constants=_banks(sizes, ""),
        global_bytes=sizes.get(".nv.global", 0) + sizes.get(".nv.global.init", 0),
        executable=elf.type == _ET_EXEC,
        size=elf.extent,
    )


def _banks(sizes: dict[str, int], suffix: str) -> dict[int, int]:
    found = ((bank, sizes.get(f".nv.constant{bank}{suffix}")) for bank in range(18))
    return {bank: size for bank, size in found if size is not None}


def _function_attributes(
    elf: _Elf, section: _Section | None
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Registers, frame and least stack in bytes, each by the function's symbol index."""
    registers: dict[int, int] = {}
    frames: dict[int, int] = {}
    stacks: dict[int, int] = {}
    tables = {
        _EIATTR_REGCOUNT: registers,
        _EIATTR_FRAME_SIZE: frames,
        _EIATTR_MIN_STACK_SIZE: stacks,
    }
    if section is not None:
        for attribute, _, payload in _attributes(elf.content(section)):
            if attribute in tables and len(payload) == 8:
                function, value = struct.unpack("<II", payload)
                tables[attribute][function] = value
    return registers, frames, stacks


def _attributes(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield attribute, short value and long value of each item of `.nv.info` or `.nv.compat`."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        form, attribute, value = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        length = value if form == _EIFMT_SVAL else 0
        yield attribute, value, data[at : at + length]
        at += length


def _cuda_arch(elf: _Elf, by_name: dict[str, _Section]) -> str:
    if elf.abi == 7:
        number, accelerated = elf.flags & 0xFF, bool(elf.flags & 0x800)
    elif elf.abi == 8:
        number, accelerated = elf.flags >> 8 & 0xFF, bool(elf.flags & 0x8)
        compat = by_name.get(".nv.compat")
        if compat is not None:
            accelerated |= any(
                attribute == _EICOMPAT_ACCELERATOR and value & 0xFF == 1
                for attribute, value, _ in _attributes(elf.content(compat))
            )
    else:
        raise _Damaged(f"has an unknown ABI version: {elf.abi}")
    arch = f"sm_{number}"
    if accelerated:
        return f"{arch}a"
    return f"{arch}f" if _noted_arch(elf, by_name) == f"{arch}f" else arch


def _noted_arch(elf: _Elf, by_name: dict[str, _Section]) -> str:
    section = by_name.get(".note.nv.tkinfo")
    if section is None or section.kind != _SHT_NOTE:
        return ""
    for _, _, description in elf.notes(section):
        noted = _ARCH_OPTION.search(description)
        if noted:
            return noted[1].decode()
    return ""


class _AmdKernel(msgspec.Struct):
    name: str = msgspec.field(name=".name")
    symbol: str = msgspec.field(name=".symbol")
    vector_registers: int = msgspec.field(name=".vgpr_count")
    shared: int = msgspec.field(name=".group_segment_fixed_size")
    private: int = msgspec.field(name=".private_segment_fixed_size")
    arguments: int = msgspec.field(name=".kernarg_segment_size")


class _AmdMetadata(msgspec.Struct):
    target: str = msgspec.field(name="amdhsa.target")
    kernels: list[_AmdKernel] = msgspec.field(name="amdhsa.kernels")


def _code_object(elf: _Elf) -> tuple[str, tuple[Kernel, ...]]:
    """Architecture and kernels of an AMDGPU code object, from its metadata note.

    Follows "Code Object V3 Metadata" in LLVM's User Guide for AMDGPU Backend. Private memory is
    reported as stack, kernel arguments as bank 0.
    """
    metadata = _amd_metadata(elf)
    code = {
        elf.name(strings, symbol.name): symbol.size
        for symbol, strings in elf.symbols(_SHT_DYNSYM)
        if symbol.kind == _STT_FUNC
    }
    kernels = (
        Kernel(
            name=kernel.name,
            registers=kernel.vector_registers,
            shared_bytes=kernel.shared,
            local_bytes=0,
            stack_bytes=kernel.private,
            code_bytes=code.get(kernel.name, 0),
            constants={0: kernel.arguments},
        )
        for kernel in metadata.kernels
    )
    # `amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-`, or MAX's `amdgpu9.42-amd-amdhsa-unknown-gfx942`
    arch = metadata.target.partition(":")[0].rpartition("-")[2]
    return arch, tuple(sorted(kernels, key=lambda kernel: kernel.name))


def _amd_metadata(elf: _Elf) -> _AmdMetadata:
    for section in elf.sections:
        if section.kind != _SHT_NOTE:
            continue
        for owner, kind, description in elf.notes(section):
            if owner == b"AMDGPU" and kind == _NT_AMDGPU_METADATA:
                try:
                    return msgspec.msgpack.decode(description, type=_AmdMetadata)
                except (msgspec.MsgspecError, RecursionError) as error:
                    message = f"has damaged metadata: {error}"
                    raise _Damaged(message) from None
    raise _Damaged("has no AMDGPU metadata")
