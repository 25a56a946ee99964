//! Two engines over one server: prefill in one, decode in the other.
use std::time::Duration;

use kv_core::StartOptions;
use kv_core::events::Tier;
use kv_testkit::servers::Server;
use kv_tier::{ExportState, Handoff, StoreOptions, TierOptions};

use crate::support::{Engine, identity, spec, text};
use crate::{Case, open};

pub(crate) const CASES: &[Case] = &[("a_decode_engine_reuses_what_was_handed_over", &[], handed)];

fn handed(server: &mut Server) {
    let engine = || {
        let lane = StoreOptions::new(Tier::Store);
        let options = TierOptions::new().with_store_options(Box::new(open(server, "")), lane);
        Engine::new(spec(256), identity(), options.with_chunk_blocks(4))
    };
    let (mut prefill, mut decode) = (engine(), engine());
    let (prompt, plain) = (text(1, 100), StartOptions::default());
    let (sequence, _) = prefill.start_alone(&prompt, plain);
    let time = Duration::from_secs(30);
    let export = prefill.cache.export_prefill(sequence, 0, time).unwrap();
    // The message is there before the chunks are.
    let handoff = Handoff::from_bytes(&export.handoff.to_bytes()).unwrap();
    let prefetch = decode.cache.import_prefill(&handoff, &prompt, &plain).unwrap();
    decode.cache.poll().unwrap();
    while prefill.cache.export_state(export.id) != Some(ExportState::Written) {
        prefill.cache.poll().unwrap();
        std::thread::sleep(Duration::from_micros(100));
    }
    decode.wait(prefetch);
    assert_eq!(decode.start(prefetch, &prompt, plain).1, 96);
    assert_eq!(server.redis("DBSIZE"), ":6");
}
