//! Batches of the past, for a consumer that lost some or came late.
use std::sync::Arc;

use crate::outbox::Outgoing;
use crate::peer::Peer;
use crate::server::Server;
use crate::zmtp::frame;

/// The number that ends an answer: -1.
const END: [u8; 8] = u64::MAX.to_be_bytes();

/// Answers a request: frames in front, which come back as they are, and the number to begin with.
/// Returns `false` for anything else.
///
/// Batches are sent one after another without a gap. If one is not kept any more, or never was in
/// this life, the answer ends there, and a live snapshot follows.
pub(crate) fn answer(server: &Server, peer: &Peer, request: &[Vec<u8>]) -> bool {
    let Some((start, envelope)) = request.split_last() else { return false };
    let Ok(start) = <[u8; 8]>::try_from(start.as_slice()) else { return false };
    let start = u64::from_be_bytes(start);
    let mut head = Vec::new();
    for part in envelope {
        frame::frame(&mut head, frame::MORE, part);
    }
    let (first, next) = {
        let store = server.store();
        (store.first(), store.next())
    };
    let mut is_whole = (first..=next).contains(&start);
    let numbers = if is_whole { start..next } else { 0..0 };
    for number in numbers {
        let Some(body) = server.store().get(number) else {
            is_whole = false;
            break;
        };
        if !peer.outbox.wait_and_append(Outgoing { head: head.clone(), body }) {
            return true;
        }
    }
    let end = Arc::from(frame::message(&[b"", &END, b""]));
    peer.outbox.wait_and_append(Outgoing { head, body: end });
    server.counters.replays.add(1);
    if !is_whole {
        server.inbox.want_snapshot();
    }
    true
}
