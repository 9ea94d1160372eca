"""The ground floor: budgets, the record of a run, the meter, the arm. It knows none of the other rooms."""
