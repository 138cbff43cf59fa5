"""Tokens -> tree, after the PTX ISA's "Syntax" and "State Spaces, Types, and Variables" chapters.

Pragmas are skipped; an unknown directive raises.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

from ptxemu.errors import PtxEmuError, PtxSyntaxError, UnsupportedPtx
from ptxemu.syntax.frames import function_addresses, resolve_calls
from ptxemu.syntax.inline import Function
from ptxemu.syntax.lexer import Token, integer_literal, register_count, tokenize, variable_bytes
from ptxemu.syntax.tree import (
    CARRY,
    TYPE_BITS,
    Addr,
    Args,
    Entry,
    Imm,
    Instr,
    LineInfo,
    ModuleTree,
    Not,
    Pair,
    Reg,
    Special,
    Sym,
    Variable,
    Vec,
)

# Directives of an entry: PTX ISA, "Performance-Tuning Directives", "Cluster Dimension Directives".
# `ptxemu.machine.shape` applies them to a launch.
_CLUSTERS = {".explicitcluster", ".reqnctapercluster", ".maxclusterrank", ".blocksareclusters"}
TUNING = {".maxntid", ".reqntid", ".minnctapersm", ".maxnreg", ".noreturn", *_CLUSTERS}
_WITHOUT_CLUSTERS = re.compile(r"sm_[1-8]\d(?!\d)")
_CONFLICTS = (("maxntid", "reqntid"), ("maxclusterrank", "reqnctapercluster"))


def added(entry: Entry, word: str, values: tuple[int, ...]) -> PtxEmuError | None:
    """Add a directive to an entry, or return why ptxas would not assemble it, or it is not
    emulated."""
    if word in _CLUSTERS and _WITHOUT_CLUSTERS.match(entry.target):
        return UnsupportedPtx(f"{word} needs sm_90, and the module is of .target {entry.target}")
    if word == ".blocksareclusters":
        return UnsupportedPtx(
            f"{word}: the grid of a launch counts clusters, which is not emulated; take the "
            "directive out, and launch clusters times CTAs of a cluster"
        )
    if word in (".reqntid", ".reqnctapercluster", ".maxclusterrank") and min(values, default=0) < 1:
        return PtxSyntaxError(f"{word} {', '.join(map(str, values))}: every value must be >= 1")
    entry.directives[word.lstrip(".")] = values
    for one, other in _CONFLICTS:
        if {one, other} <= entry.directives.keys():
            return PtxSyntaxError(f".{one} and .{other} cannot both be given")
    return None


VECTORS = {"v2": ("x", "y"), "v4": ("x", "y", "z", "w")}


class Scopes:
    """The scopes around one place of one function, innermost last. `vectors` maps the unique name
    of a vector register to the names of its elements, which are registers of their own."""

    def __init__(self) -> None:
        self._names: list[dict[str, str]] = [{}]
        self._numbers = [0]
        self._count = 0
        self.vectors: dict[str, tuple[str, ...]] = {}

    def enter(self, labels: set[str]) -> None:
        """A scope begins; its labels are known ahead of use, as a branch may go forward."""
        self._count += 1
        self._names.append({name: f"{name}@{self._count}" for name in labels})
        self._numbers.append(self._count)

    def leave(self) -> None:
        self._names.pop()
        self._numbers.pop()

    def declare(self, name: str) -> str:
        """The unique name of a register, variable or label that is declared here."""
        if len(self._names) == 1:
            return name
        return self._names[-1].setdefault(name, f"{name}@{self._numbers[-1]}")

    def declare_register(self, name: str, vector: str) -> tuple[str, ...]:
        """The registers behind a declared name: itself, or the elements of a `vector` (v2, v4)."""
        unique = self.declare(name)
        if not vector:
            return (unique,)
        self.vectors[unique] = tuple(self.declare(f"{name}.{part}") for part in VECTORS[vector])
        return self.vectors[unique]

    def resolve(self, name: str) -> str:
        """Return the unique name for which `name` stands here."""
        for scope in reversed(self._names):
            if name in scope:
                return scope[name]
        return name


_DECLARED = "b8 u8 s8 b16 u16 s16 f16 bf16 b32 u32 s32 f32 f16x2 bf16x2 b64 u64 s64 f64 b128"
TYPE_BYTES = {name: TYPE_BITS[name] // 8 for name in _DECLARED.split()}  # of variables
_TEXTURES = ("texref", "samplerref", "surfref")
_SPACES = (".shared", ".global", ".const", ".local", ".param")
_LINKAGE = (".extern", ".visible", ".weak", ".common")
_SKIPPED_LINES = (".pragma", ".address_size")
_LISTS = (
    ".branchtargets",
    ".calltargets",
    ".callprototype",
)  # label: directive of labels or functions;
_SPECIAL = re.compile(
    r"%(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(?:\.[xyz])?$"
    r"|%(?:laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock_hi|clock64|globaltimer|globaltimer_lo"
    r"|globaltimer_hi|lanemask_(?:eq|le|lt|ge|gt)|cluster_ctarank|cluster_nctarank"
    r"|is_explicit_cluster|dynamic_smem_size|total_smem_size|aggr_smem_size"
    r"|reserved_smem_offset_\w+|envreg\d+|pm\d+)$|%[\w$]+\.(?:b[0-3]{1,4}|h[0-3]{1,2})$"
)


class Parser:
    """Parser of one module in one pass over its tokens; call `parse()`."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.tokens: list[Token] = tokenize(text)
        self.tokens.append(("end", "", len(self.lines)))
        self.at = 0
        self.tree = ModuleTree()
        self.scopes = Scopes()
        self.line_info = LineInfo(self.tree.files)
        self.entry: Entry | None = None
        self.target = ""
        self.definitions: dict[str, Function] = {}
        self.aliases: dict[str, str] = {}  # of functions
        self.signatures: dict[str, Vec] = {}  # of .callprototype and .calltargets, by label
        self.registers: dict[str, Reg] = {}  # one object for all uses

    # -- token helpers ----------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][1]

    def kind(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][0]

    @property
    def line(self) -> int:
        return self.tokens[self.at][2]

    def next(self) -> str:
        kind, text, _ = self.tokens[self.at]
        if kind == "end":
            self.fail("the text ends too early")
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        if self.tokens[self.at][1] == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.peek()!r}")

    def fail(self, message: str, error: type[PtxEmuError] = PtxSyntaxError) -> NoReturn:
        raise error(message, line=self.line, text=self.lines[self.line - 1].strip())

    def skip_line(self) -> list[str]:
        """The words of a directive that is one source line without a semicolon."""
        line, start = self.line, self.at
        while self.line == line and self.kind() != "end":
            self.at += 1
        return [text for _, text, _ in self.tokens[start : self.at]]

    def skip_braces(self) -> None:
        depth = 0
        while self.kind() != "end":
            text = self.next()
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return
        self.fail("a brace is never closed")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        if self.kind() != "number":
            self.fail(f"expected an integer, found {self.peek()!r}")
        return sign * integer_literal(self.next())

    # -- module level -----------------------------------------------------------------------

    def parse(self) -> ModuleTree:
        while self.kind() != "end":
            self.module_statement()
        for alias, name in self.aliases.items():
            if name in self.definitions:
                self.definitions.setdefault(alias, self.definitions[name])
        self.tree.addresses = function_addresses(self.definitions)
        taken = {name: at for name, at in self.tree.addresses.items() if name in self.taken}
        for entry in self.tree.entries.values():
            resolve_calls(entry, self.definitions, taken)
        return self.tree

    @property
    def taken(self) -> set[str]:
        """Names whose address an instruction or an initialiser takes."""
        entries = [*self.tree.entries.values(), *(f.code for f in self.definitions.values())]
        variables = [*self.tree.variables, *(each for e in entries for each in e.variables)]
        found: list[Any] = [item for each in variables for item in each.init]
        for instr in (item for e in entries for item in e.body if isinstance(item, Instr)):
            if instr.root == "call":  # a list of targets stands behind the arguments
                last = instr.operands[-1] if instr.operands else None
                found += last.items if isinstance(last, Vec) else ()
            else:
                found += instr.operands
        return {item.name for item in found if isinstance(item, Sym)}

    def module_statement(self) -> None:
        word = self.peek()
        if word == ".version":
            self.next()
            self.next()
        elif word == ".target":
            self.next()
            self.target = self.next()
            while self.accept(","):
                self.next()
        elif word == ".file":
            self.file_directive()
        elif word == ".alias":
            _, alias, _, name, *_ = self.skip_line()
            self.aliases[alias] = name
        elif word in _SKIPPED_LINES:
            self.skip_line()
        elif word == ".section":
            self.at += 2
            self.skip_braces()
        elif word in _LINKAGE:
            self.linkage()
        elif word == ".entry":
            self.entry_definition()
        elif word == ".func":
            self.function()
        elif word.startswith(_SPACES):
            self.tree.variables += self.variable_declaration()
        else:
            self.fail(f"unknown statement {word!r}")

    def linkage(self) -> None:
        extern = self.next() in (".extern", ".common")
        if self.peek().startswith(_SPACES):
            self.tree.variables += self.variable_declaration(extern)

    def file_directive(self) -> None:
        self.next()
        number = self.integer()
        self.tree.files[number] = self.next().strip('"')
        while self.accept(","):
            self.next()

    def function(self) -> None:
        """Parse a `.func`, whose body is inlined at calls.

        An unreadable one is recorded by its name and refused only when it is called.
        """
        start = self.at
        self.next()
        try:
            results = self.formals()
            code = Entry(self.next(), target=self.target)
            code.params = self.formals()
            self.skip_to_body()
            if self.peek() == "{":
                self.function_body(Function(code, results))
        except PtxSyntaxError:
            self.at = start + 1
            if self.accept("("):
                while self.next() != ")":
                    pass
            self.tree.functions.add(self.next())
            self.skip_to_body()
            if self.peek() == "{":
                self.skip_braces()
            else:
                self.next()
            return
        self.tree.functions.add(code.name)
        if self.peek() == ";":
            self.next()

    def skip_to_body(self) -> None:
        while self.peek() not in (";", "{"):
            self.next()

    def formals(self) -> list[Variable]:
        """Results or parameters of a function, in the .param or the .reg space."""
        found: list[Variable] = []
        if self.accept("("):
            while not self.accept(")"):
                found += self.declarators()
                self.accept(",")
        return found

    def function_body(self, function: Function) -> None:
        code = function.code
        code.registers |= {x.name: x.type for x in function.formals if x.space == "reg"}
        self.entry, self.scopes = code, Scopes()
        self.line_info.enter_function()
        self.next()
        while not self.accept("}"):
            self.body_statement(code)
        self.definitions[code.name] = function

    # -- declarations -----------------------------------------------------------------------

    def variable_declaration(self, extern: bool = False) -> list[Variable]:
        found = self.declarators(extern)
        self.expect(";")
        return found

    def declarators(self, extern: bool = False) -> list[Variable]:
        """`.space .align N .type name[count] = {...}, name2 ...` without the final semicolon."""
        space = self.next().lstrip(".").split("::")[0]
        align, type_name, vector = 0, "", 1
        while self.kind() == "directive":
            word = self.next()
            if word == ".align":
                align = self.integer()
            elif word in (".v2", ".v4"):
                vector = int(word[2])
            elif word == ".attribute":
                self.expect("(")
                while not self.accept(")"):
                    self.next()
            elif word not in (".ptr", *_SPACES):
                type_name = word.lstrip(".")
        if type_name in _TEXTURES:
            what = f"textures and surfaces are not supported: a variable of .{type_name}"
            self.fail(what, UnsupportedPtx)
        if type_name not in TYPE_BYTES:
            self.fail(f"unknown type .{type_name}")
        found = []
        while True:
            found.append(self.declarator(space, type_name, vector, align, extern))
            if not (self.peek() == "," and self.kind(1) == "word"):
                return found
            self.next()

    def declarator(
        self, space: str, type_name: str, vector: int, align: int, extern: bool
    ) -> Variable:
        name = self.next()
        size = TYPE_BYTES[type_name] * vector
        count = 1
        while self.accept("["):
            count *= 0 if self.peek() == "]" else self.integer()
            self.expect("]")
        init = ()
        if self.accept("="):
            init = self.initializer()
            if count == 0:
                count = len(init)
        nbytes = variable_bytes(size * count, align, size // vector * len(init))
        return Variable(name, space, type_name, align or size, nbytes, init, extern)

    def initializer(self) -> tuple[Any, ...]:
        if not self.accept("{"):
            return (self.immediate_or_symbol(),)
        items: list[Any] = []
        while not self.accept("}"):
            items += self.initializer() if self.peek() == "{" else [self.immediate_or_symbol()]
            self.accept(",")
        return tuple(items)

    def immediate_or_symbol(self) -> Imm | Sym:
        """A number, or the address of a symbol, also a generic one: `name+8`, `generic(name)`."""
        if self.kind() != "word":
            return self.immediate()
        name = self.next()
        if name == "generic" and self.accept("("):
            name = self.next()
            offset = self.optional_offset()
            self.expect(")")
            return Sym(name, offset + self.optional_offset())
        return Sym(name, self.optional_offset())

    def optional_offset(self) -> int:
        return self.signed_offset() if self.peek() in ("+", "-") else 0

    # -- entries ----------------------------------------------------------------------------

    def entry_definition(self) -> None:
        self.next()
        entry = Entry(self.next(), target=self.target)
        entry.registers[CARRY] = "b32"
        self.entry = entry
        entry.params = self.formals()
        while self.peek() != "{":
            self.tuning_directive(entry)
        self.tree.entries[entry.name] = entry
        self.scopes = Scopes()
        self.line_info.enter_function()
        self.next()
        while not self.accept("}"):
            self.body_statement(entry)

    def tuning_directive(self, entry: Entry) -> None:
        word = self.next()
        if word == ".pragma":
            self.skip_line()
            return
        if word not in TUNING:
            self.at -= 1
            self.fail(f"unknown directive {word!r}")
        line, values = self.tokens[self.at - 1][2], []
        while self.kind() == "number":
            values.append(self.integer())
            self.accept(",")
        if error := added(entry, word, tuple(values)):
            raise error.at(line=line, text=self.lines[line - 1].strip())

    def body_statement(self, entry: Entry) -> None:
        kind, word = self.kind(), self.peek()
        if word == "{":
            self.nested_scope(entry)
        elif word == ".reg":
            self.register_declaration(entry)
        elif word == ".loc":
            self.line_info.loc(self.skip_line())
        elif word == ".pragma":
            while self.next() != ";":
                pass
        elif word == ".file":
            self.skip_line()
        elif kind == "directive" and word.startswith(_SPACES):
            self.local_variable(entry)
        elif word == ";":
            self.next()
        elif kind == "word" and self.peek(1) == ":" and self.peek(2) in _LISTS:
            self.label_list(entry)
        elif kind == "word" and self.peek(1) == ":":
            entry.body.append(self.scopes.declare(word))
            self.at += 2
        else:
            entry.body.append(self.instruction())

    def label_list(self, entry: Entry) -> None:
        """`name: .branchtargets label, label;` and its like, over any number of lines."""
        name = self.scopes.declare(self.next())
        self.next()
        directive = self.next()
        if directive == ".callprototype":
            self.prototype(name)
            return
        labels = [self.scopes.resolve(self.next())]
        while self.accept(","):
            labels.append(self.scopes.resolve(self.next()))
        self.expect(";")
        if directive == ".calltargets":
            self.signatures[name] = Vec(tuple(Sym(label) for label in labels))
        else:
            entry.lists[name] = tuple(labels)

    def prototype(self, name: str) -> None:
        """`(results) _ (parameters)`: kept as the number of results and the bytes of all."""
        results = self.formals()
        self.next()
        formals = [*results, *self.formals()]
        while not self.accept(";"):
            self.next()
        sizes = (len(results), *(formal.nbytes for formal in formals))
        self.signatures[name] = Vec(tuple(Imm(size) for size in sizes))

    def local_variable(self, entry: Entry) -> None:
        for variable in self.variable_declaration():
            name = self.scopes.declare(variable.name)
            entry.variables.append(
                Variable(name, variable.space, variable.type, variable.align, variable.nbytes)
            )

    def nested_scope(self, entry: Entry) -> None:
        self.next()
        self.scopes.enter(self.scope_labels())
        while not self.accept("}"):
            self.body_statement(entry)
        self.scopes.leave()

    def scope_labels(self) -> set[str]:
        """Labels of the scope that starts here."""
        names: set[str] = set()
        depth = 0
        for position in range(self.at, len(self.tokens) - 1):
            kind, text, _ = self.tokens[position]
            depth += (text == "{") - (text == "}")
            if depth < 0:
                return names
            if depth == 0 and kind == "word" and self.tokens[position + 1][1] == ":":
                names.add(text)
        self.fail("a brace is never closed")

    def register_declaration(self, entry: Entry) -> None:
        self.next()
        type_name, vector = self.next().lstrip("."), ""
        if type_name in VECTORS:
            type_name, vector = self.next().lstrip("."), type_name
        if type_name not in TYPE_BITS:
            self.fail(f"unknown type .{type_name}")
        while True:
            names = [self.next()]
            if self.accept("<"):
                count = register_count(self.integer(), len(entry.registers))
                names = [f"{names[0]}{i}" for i in count]
                self.expect(">")
            for name in names:
                for register in self.scopes.declare_register(name, vector):
                    entry.registers[register] = type_name
            if self.accept(";"):
                return
            self.expect(",")

    # -- instructions -----------------------------------------------------------------------

    def instruction(self) -> Instr:
        line = self.line
        guard = self.predicate() if self.accept("@") else None
        if self.kind() != "word":
            self.fail(f"expected an instruction, found {self.peek()!r}")
        opcode = self.next()
        while self.kind() == "directive":  # modifiers may stand apart from the word
            opcode += self.next()
        operands = []
        while not self.accept(";"):
            operands.append(self.operand())
            if not self.accept(","):
                self.expect(";")
                break
        text = self.lines[line - 1].strip()
        if opcode in ("call", "call.uni") and operands and isinstance(operands[-1], Sym):
            operands[-1] = self.signatures.get(operands[-1].name, operands[-1])
        return Instr(opcode, tuple(operands), guard, line, text, self.line_info.here)

    def predicate(self) -> Reg | Not:
        """Parse a predicate with or without an exclamation mark."""
        negated, word = self.accept("!"), self.next()
        name = self.scopes.resolve(word)
        if self.entry is None or self.entry.registers.get(name) != "pred":
            self.fail(f"{word!r} is not a register of type .pred")
        return Not(Reg(name)) if negated else Reg(name)

    def operand(self) -> object:
        kind, text = self.kind(), self.peek()
        if text == "[":
            return self.address()
        if text == "{":
            return Vec(self.item_list("}"))
        if text == "(":
            return Args(self.item_list(")"))
        if text == "!":
            return self.predicate()
        if kind == "word":
            return self.word_operand()
        return self.immediate()

    def word_operand(self) -> object:
        first = self.name_operand(self.next())
        if self.accept("|"):
            return Pair(first, self.name_operand(self.next()))
        if isinstance(first, Sym) and self.peek() in "+-":
            return Sym(first.name, self.signed_offset())
        return first

    def name_operand(self, word: str) -> object:
        if word == "_":
            return None
        if word == "WARP_SZ":
            return Imm(32)
        name = self.scopes.resolve(word)
        if self.entry is not None and name in self.entry.registers:
            return self.registers.get(name) or self.registers.setdefault(name, Reg(name))
        if name in self.scopes.vectors:
            return Vec(tuple(Reg(part) for part in self.scopes.vectors[name]))
        if word.startswith("%"):
            if _SPECIAL.match(word):
                return Special(word)
            self.at -= 1
            self.fail(f"undeclared register {word!r}")
        return Sym(name)

    def item_list(self, close: str) -> tuple[Any, ...]:
        self.next()
        items = []
        while not self.accept(close):
            items.append(self.operand())
            self.accept(",")
        return tuple(items)

    def address(self) -> Addr:
        self.next()
        base = self.operand()
        offset, coords = 0, ()
        if isinstance(base, Sym):
            base, offset = Sym(base.name), base.offset
        if self.peek() in "+-":
            offset = self.signed_offset()
        if self.accept(","):
            vector = self.operand()
            coords = vector.items if isinstance(vector, Vec) else (vector,)
        self.expect("]")
        return Addr(base, offset, coords)

    def signed_offset(self) -> int:
        sign = 1
        while self.peek() in ("+", "-"):
            sign *= -1 if self.next() == "-" else 1
        return sign * self.integer()

    def immediate(self) -> Imm:
        sign = -1 if self.accept("-") else 1
        kind, text = self.kind(), self.next()
        if kind == "hexfloat":
            return Imm(int(text[2:], 16), float_bits=32 if text[1] in "fF" else 64)
        if kind != "number":
            self.at -= 1
            self.fail(f"expected an operand, found {text!r}")
        if "." in text:
            return Imm(sign * float(text))
        return Imm(sign * integer_literal(text))


def parse(text: str) -> ModuleTree:
    """Parse a PTX module; raises PtxSyntaxError with the line."""
    parser = Parser(text)
    try:
        return parser.parse()
    except (ValueError, OverflowError) as error:  # of numbers
        parser.fail(str(error))
