"""The rank host `ray`: ranks of one engine on several nodes of a Ray cluster, which places them and sees no step."""
