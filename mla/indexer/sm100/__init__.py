"""The score kernel of Blackwell: e2m1 by e2m1 on the tensor core, scales of groups of 32."""
