"""RankMesh's agent: the collective engine, the store and the HTTP face of one rank."""
