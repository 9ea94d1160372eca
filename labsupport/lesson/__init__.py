"""What makes a notebook a lab: predictions and guesses, verdicts, exercises, the learner's ledger. It knows ground floor and showing."""
