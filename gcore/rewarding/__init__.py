"""How responses become rewards: rules, scalar models, generative judges and servers, blended into one number."""
