"""PTX arithmetic on numpy arrays: storage formats, IEEE operations, approximations, integers."""
