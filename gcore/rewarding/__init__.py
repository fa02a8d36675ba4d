"""Computes rewards of responses: rules, scalar models, generative judges and servers, summed into one number."""
