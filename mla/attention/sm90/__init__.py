"""Attention to latent keys on Hopper: wgmma, two warpgroups that share 64 query rows."""
