"""Operations of 32 lanes as machine code, compiled once per machine by llvmlite if it is installed.

`primitives` defines the operations and is the only file that knows LLVM. `library` compiles, keeps
and loads the code. `recipes` translates the templates of pure nodes to primitives. The templates
stay the definition: numpy runs whatever has no recipe, and everything without llvmlite.
"""
