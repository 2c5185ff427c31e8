"""The conformance kit: checks that every policy must pass, Headway's own and yours.

    from headway.testing import check_router

    def test_my_router() -> None:
        check_router(MyRouter)

There is one check for each kind of policy. Its argument `make` is any callable that returns a fresh policy: the class
itself, a lambda that passes arguments, or a result of `headway.policies.resolve`. A policy that breaks a rule raises
`BrokenPolicyError`, an AssertionError whose text names the rule. `router_reads` and its siblings return the attributes
of the views that a policy read, such as `replica.num_waiting`.
"""

from headway.testing.kinds import ADMISSIONS, CASCADES, MIGRATIONS, ROUTERS, SCALERS
from headway.testing.orderings import ORDERINGS
from headway.testing.strict_views import BrokenPolicyError

check_admission, admission_reads = ADMISSIONS.check, ADMISSIONS.reads
check_cascade, cascade_reads = CASCADES.check, CASCADES.reads
check_migration, migration_reads = MIGRATIONS.check, MIGRATIONS.reads
check_ordering, ordering_reads = ORDERINGS.check, ORDERINGS.reads
check_router, router_reads = ROUTERS.check, ROUTERS.reads
check_scaler, scaler_reads = SCALERS.check, SCALERS.reads

__all__ = [
    "BrokenPolicyError", "admission_reads", "cascade_reads", "check_admission", "check_cascade", "check_migration",
    "check_ordering", "check_router", "check_scaler", "migration_reads", "ordering_reads", "router_reads",
    "scaler_reads",
]  # fmt: skip
