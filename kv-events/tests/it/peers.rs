//! Handshakes, subscriptions, and peers that misbehave.
use std::io::Write;
use std::time::{Duration, Instant};

use kv_events::{BindError, Publisher};

use crate::client::{Client, command, connect, frame, greeting, ready};
use crate::support::{bind, options, prompt, stored, subscribe, wait_until};

#[test]
fn a_peer_is_greeted_and_its_pings_are_answered() {
    let publisher = bind(&options());
    let addresses = publisher.addresses();
    for (address, peer, server) in
        [(addresses.events, "SUB", "PUB"), (addresses.replay.unwrap(), "DEALER", "ROUTER")]
    {
        let mut client = Client::new(address, peer, 1);
        assert_eq!((client.greeting[0], client.greeting[9]), (0xff, 0x7f));
        assert_eq!(&client.greeting[10..18], b"\x03\x01NULL\0\0");
        assert_eq!(client.socket_type, server);
        client.send(&command("PING", b"\0\0some context"));
        assert_eq!(client.frame(), (4, b"\x04PONGsome context".to_vec()));
    }
}

#[test]
fn versions_3_0_and_3_1_subscribe_and_cancel() {
    let publisher = bind(&options().topic("kv@pod@model"));
    for minor in [0, 1] {
        let mut client = Client::new(publisher.addresses().events, "SUB", minor);
        let wish = |code: u8, topic: &[u8]| match minor {
            0 => frame(0, &[&[code], topic].concat()),
            _ => command(if code == 1 { "SUBSCRIBE" } else { "CANCEL" }, topic),
        };
        client.send(&wish(1, b"kv@other"));
        client.send(&wish(1, b"kv@p"));
        let batch = client.batch();
        assert_eq!(batch.topic, b"kv@pod@model");
        assert_eq!(client.batch().number, batch.number + 1);
        client.send(&wish(0, b"kv@p"));
        client.send(&command("PING", b"\0\0"));
        // Batches on their way come before the answer; after it there are none.
        while client.frame() != (4, b"\x04PONG".to_vec()) {}
        client.stream.set_read_timeout(Some(Duration::from_millis(80))).unwrap();
        assert!(client.stream.peek(&mut [0]).is_err(), "a batch that is not wanted");
    }
    assert_eq!(publisher.stats().faulty_peers, 0);
}

#[test]
fn a_ping_says_after_which_silence_a_peer_is_gone() {
    let publisher = bind(&options());
    let mut client = subscribe(&publisher);
    client.send(&command("PING", b"\0\x01"));
    wait_until(|| publisher.stats().subscribers == 0);
    assert_eq!(publisher.stats().faulty_peers, 1);
    Client::wait_for_end(&mut client.stream);
}

#[test]
fn the_seventeenth_peer_is_refused() {
    let publisher = bind(&options());
    let mut clients: Vec<_> = (0..16).map(|_| subscribe(&publisher)).collect();
    let mut late = connect(publisher.addresses().events);
    Client::wait_for_end(&mut late);
    let stats = publisher.stats();
    assert_eq!((stats.subscribers, stats.refused_peers, stats.faulty_peers), (16, 1, 0));
    clients.pop();
    wait_until(|| publisher.stats().subscribers == 15);
    clients.push(subscribe(&publisher));
    assert!(clients.iter_mut().all(|client| client.batch().number > 0));
}

#[test]
fn noise_ends_its_own_connection_alone() {
    let publisher = bind(&options());
    let mut witness = subscribe(&publisher);
    let giant = [&[2_u8][..], &(1_u64 << 30).to_be_bytes()].concat();
    let started = [greeting(1), ready("SUB")].concat();
    let wishes = command("SUBSCRIBE", b"x").repeat(65);
    let cases = [
        b"GET / HTTP/1.1\r\nhost: kv\r\n\r\n".to_vec(),
        (0..=255).cycle().take(5000).collect(),
        [started.as_slice(), &giant].concat(),
        [greeting(1).as_slice(), &giant].concat(),
        [greeting(1), ready("PUSH")].concat(),
        [greeting(1), command("SUBSCRIBE", b"")].concat(),
        [started.as_slice(), &wishes].concat(),
    ];
    for (case, bytes) in cases.iter().enumerate() {
        let mut stream = connect(publisher.addresses().events);
        // The server may close the connection before it has read everything.
        let _ = stream.write_all(bytes);
        Client::wait_for_end(&mut stream);
        let faults = u64::try_from(case).unwrap() + 1;
        wait_until(|| publisher.stats().faulty_peers == faults);
    }
    let mut polite = connect(publisher.addresses().events);
    polite.write_all(&[started, command("ERROR", b"\x02no")].concat()).unwrap();
    Client::wait_for_end(&mut polite);
    assert_eq!(publisher.stats().faulty_peers, 7, "a peer may refuse the connection");
    let first = witness.batch();
    assert_eq!(witness.batch().number, first.number + 1);
}

#[test]
fn half_a_greeting_delays_nobody_and_the_end_is_prompt() {
    let publisher = bind(&options());
    let mut half = connect(publisher.addresses().events);
    half.write_all(&greeting(1)[..30]).unwrap();
    let mut client = subscribe(&publisher);
    publisher.publish(&stored(&prompt(1, 3)));
    while client.batch().events().is_empty() {}
    let begin = Instant::now();
    drop(publisher);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    Client::wait_for_end(&mut half);
    Client::wait_for_end(&mut client.stream);
}

#[test]
fn a_stopped_reader_delays_nobody_and_loses_whole_batches() {
    let room = 1 << 20;
    let publisher = bind(&options().subscriber_bytes(room));
    let (mut stopped, mut reader) = (subscribe(&publisher), subscribe(&publisher));
    // 32 MiB: more than both sockets buffer.
    let blocks = prompt(1, 2000);
    let mut slowest = Duration::ZERO;
    let mut last = 0;
    for turn in 0..400 {
        let begin = Instant::now();
        publisher.publish(&if turn % 2 == 0 {
            stored(&blocks)
        } else {
            crate::support::removed(&blocks)
        });
        slowest = slowest.max(begin.elapsed());
        let batch = reader.batch();
        assert!(last == 0 || batch.number == last + 1, "the reader has a gap");
        last = batch.number;
        if publisher.stats().dropped_messages > 0 {
            break;
        }
    }
    assert!(slowest < Duration::from_millis(500), "{slowest:?}");
    wait_until(|| publisher.stats().dropped_messages > 0);
    let sent = publisher.stats().batches;
    // It reads again: whole batches, with a gap, up to the present.
    let first = stopped.batch();
    let mut previous = first.number;
    let mut gaps = 0;
    while previous < first.number + sent {
        let batch = stopped.batch();
        assert!(batch.number > previous && !batch.payload.is_empty());
        gaps += batch.number - previous - 1;
        previous = batch.number;
    }
    assert!(gaps > 0);
    assert_eq!(publisher.stats().dropped_messages, gaps);
}

#[test]
fn an_endpoint_in_use_is_a_typed_error() {
    let publisher = bind(&options());
    let used = format!("tcp://{}", publisher.addresses().events);
    match Publisher::bind(&options().endpoint(used.as_str())) {
        Err(BindError::Bind { endpoint, source }) => {
            assert_eq!((endpoint, source.kind()), (used, std::io::ErrorKind::AddrInUse));
        }
        other => panic!("{other:?}"),
    }
    let malformed = Publisher::bind(&options().replay_endpoint("ipc://x"));
    assert!(matches!(malformed, Err(BindError::Endpoint { .. })));
}
