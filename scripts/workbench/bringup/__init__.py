"""What is asked first of a GPU that no kernel of this repository has run on."""
