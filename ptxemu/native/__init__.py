"""Operations of 32 lanes as machine code, compiled once per machine by llvmlite, where it is there.

`primitives` says what there is and is the only file that knows LLVM; `library` compiles, keeps and
loads it; `recipes` translates the templates of pure nodes to it. The templates stay the definition:
what no recipe translates runs in numpy, and without llvmlite everything does.
"""
