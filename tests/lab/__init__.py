"""Tests of the commands of scripts/, and of their code in lab/."""
