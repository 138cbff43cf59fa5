"""Why a kernel takes what it takes."""
