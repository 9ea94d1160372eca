"""What a learner did, kept and shown: the ledger, the start page, and the results of a class."""
