"""Problems as the flags of a command spell them, and their inputs."""
