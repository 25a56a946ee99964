//! Recurrent states: slots of running sequences, and snapshots that prompts go on from.
mod random;
mod recurrence;
mod slots;
mod snapshots;

use super::case;
use crate::case::Case;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("states/steps_of_any_length", slots::lengths),
        case("states/drafts", slots::drafts),
        case("states/random_operations", random::random),
        case("states/slots_in_place", slots::in_place),
        case("states/wiped_slots_are_zero", slots::wipe),
        case("states/refusals", slots::refusals),
        case("states/hits_at_every_length", snapshots::every_length),
        case("states/turns_of_a_chat", snapshots::turns),
        case("states/branches_splits_and_tenants", snapshots::branches),
        case("states/snapshots_in_f16", snapshots::rounded),
        case("states/snapshots_in_int8", snapshots::quantised),
        case("states/random_operations_with_snapshots", random::random_with_snapshots),
    ]
}
