//! The store over memory, without a server; URLs.
use object_store::PutPayload;
use tokio::runtime::Builder;

use super::*;
use crate::name::ChunkName;

fn chunk(number: u8) -> ChunkAddress {
    ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([number; 32]) }
}

fn soon() -> Instant {
    Instant::now().checked_add(Duration::from_secs(20)).unwrap()
}

/// Checks the behaviour that all backends share.
fn check(store: &ObjectStore) {
    let mut into = [0xee; 8];
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), None);
    assert_eq!(store.put(&chunk(1), b"first", soon()).unwrap(), Put::New);
    assert_eq!(store.put(&chunk(1), b"other", soon()).unwrap(), Put::WasThere);
    assert_eq!(store.get(&chunk(1), &mut into, soon()).unwrap(), Some(5));
    assert_eq!(&into, b"first\xee\xee\xee");
    assert_eq!(
        store.get(&chunk(1), &mut [0; 4], soon()).unwrap_err().kind(),
        StoreErrorKind::Corrupt
    );
    assert_eq!(store.put(&chunk(2), b"", soon()).unwrap_err().kind(), StoreErrorKind::Corrupt);
    store.put(&chunk(3), b"third", soon()).unwrap();
    let chunks: Vec<_> = (0..100).map(chunk).collect();
    let present = store.contains(&chunks, soon()).unwrap();
    let found: Vec<_> = (0..100).filter(|at| present[*at]).collect();
    assert_eq!(found, [1, 3]);
    store.remove(&chunks, soon()).unwrap();
    assert_eq!(store.contains(&[chunk(1), chunk(3)], soon()).unwrap(), [false, false]);
    let past = Instant::now().checked_sub(Duration::from_millis(1)).unwrap();
    assert_eq!(store.put(&chunk(4), b"x", past).unwrap_err().kind(), StoreErrorKind::Timeout);
    assert_eq!(store.contains(&[chunk(4)], soon()).unwrap(), [false]);
}

#[test]
fn memory_keeps_chunks() {
    check(&ObjectStore::with_variables("memory:///some/prefix", []).unwrap());
}

#[test]
fn objects_are_listed_and_their_fronts_read() {
    for prefix in ["", "some/prefix"] {
        let store = ObjectStore::with_variables(&format!("memory:///{prefix}"), []).unwrap();
        let count = u8::try_from(PAGE / 10 + 1).unwrap();
        for root in 0..10 {
            for number in 0..count {
                let root = ChunkName::new([root; 32]);
                let address = ChunkAddress { root, ..chunk(number) };
                store.put(&address, &[number; 100], soon()).unwrap();
            }
        }
        let other = store.prefix.clone().join("v1").join("notes");
        store
            .run("x", soon(), async {
                let put = store.backend.put(&other, PutPayload::from_static(b"x")).await;
                put.map_err(|error| into_error(error, "PUT".to_owned()))
            })
            .unwrap();
        let (mut chunks, mut others) = (Vec::new(), Vec::new());
        let mut visit = |listed| {
            match listed {
                Listed::Chunk(chunk) => chunks.push(chunk),
                Listed::Other { path } => others.push(path),
            }
            ControlFlow::Continue(())
        };
        store.list(Duration::from_secs(20), &mut visit).unwrap();
        assert_eq!((chunks.len(), others), (10 * usize::from(count), vec![other.to_string()]));
        let mut into = [0; 10];
        for listed in &chunks {
            assert_eq!(listed.bytes, 100);
            assert_eq!(store.get_front(&listed.address, &mut into, soon()).unwrap(), Some(10));
            assert_eq!(into, [listed.address.name.as_bytes()[0]; 10]);
        }
        assert_eq!(store.get_front(&chunk(1), &mut [0; 200], soon()).unwrap(), Some(100));
        assert_eq!(store.get_front(&chunk(255), &mut into, soon()).unwrap(), None);
        let past = store.list(Duration::ZERO, &mut |_| ControlFlow::Continue(()));
        assert_eq!(past.unwrap_err().kind(), StoreErrorKind::Timeout);
    }
}

/// Also many times within one poll of the other runtime's task.
#[test]
fn calls_work_inside_another_runtime() {
    let outer = Builder::new_current_thread().enable_all().build().unwrap();
    outer.block_on(async {
        let store = ObjectStore::with_variables("memory:///p", []).unwrap();
        check(&store);
        store.put(&chunk(1), b"x", soon()).unwrap();
        for _ in 0..500 {
            assert_eq!(store.get(&chunk(1), &mut [0; 4], soon()).unwrap(), Some(1));
        }
        drop(store);
        tokio::task::yield_now().await;
    });
}

#[test]
fn a_future_that_never_ends_is_dropped_at_the_deadline() {
    let store = ObjectStore::with_variables("memory:///", []).unwrap();
    let limit = Duration::from_millis(30);
    let late = (0..5).map(|_| {
        let start = Instant::now();
        let result = store.run(
            "x",
            start.checked_add(limit).unwrap(),
            std::future::pending::<Result<(), _>>(),
        );
        assert_eq!(result.unwrap_err().kind(), StoreErrorKind::Timeout);
        start.elapsed().saturating_sub(limit)
    });
    assert!(late.min().unwrap() <= Duration::from_millis(50));
}

#[test]
fn a_poll_that_computes_for_long_ends_at_the_deadline() {
    let store = ObjectStore::with_variables("memory:///", []).unwrap();
    let limit = Duration::from_millis(30);
    let late = (0..5).map(|_| {
        let start = Instant::now();
        let end = start.checked_add(limit).unwrap();
        let result = store.runtime.run_apart(end, async {
            std::thread::sleep(Duration::from_millis(200));
        });
        assert_eq!(result, None);
        start.elapsed().saturating_sub(limit)
    });
    assert!(late.min().unwrap() <= Duration::from_millis(50));
    assert_eq!(store.runtime.run_apart(soon(), async { 7 }), Some(7));
}

#[test]
#[should_panic(expected = "of its own")]
fn a_panic_reaches_the_caller() {
    let store = ObjectStore::with_variables("memory:///", []).unwrap();
    store.runtime.run_apart(soon(), async { panic!("of its own") });
}

#[test]
fn urls_are_checked() {
    let error = |url: &str| ObjectStore::with_variables(url, []).unwrap_err();
    assert!(matches!(error("gs://bucket"), StoreUrlError::Scheme { .. }));
    assert!(matches!(error("s3:///prefix"), StoreUrlError::Part { part: "bucket", .. }));
    assert!(matches!(error("s3://host:80/p"), StoreUrlError::Part { part: "bucket", .. }));
    assert!(matches!(error("s3://key:secret@b/p"), StoreUrlError::Part { part: "bucket", .. }));
    assert!(matches!(error("s3://bucket/a//b"), StoreUrlError::Part { part: "prefix", .. }));
    assert!(matches!(error("s3://bucket?zone=1"), StoreUrlError::UnknownParameter { .. }));
    for bad in ["endpoint=here", "endpoint=http://h", "endpoint=ftp://h&allow_http=true"] {
        let found = error(&format!("s3://bucket?{bad}"));
        assert!(
            matches!(found, StoreUrlError::Parameter { name: "endpoint", .. }),
            "{bad}: {found}"
        );
    }
    assert!(matches!(
        error("s3://bucket?allow_http=1"),
        StoreUrlError::Parameter { name: "allow_http", .. }
    ));
    assert!(matches!(error("memory:///?endpoint=x"), StoreUrlError::UnknownParameter { .. }));
}

#[test]
fn a_store_does_not_print_its_credentials() {
    let variables = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
        .map(|name| (name.to_owned(), "s3cret".to_owned()));
    let url = "s3://bucket/some/prefix?endpoint=http://h:9000&allow_http=true&region=eu";
    let store = ObjectStore::with_variables(url, variables).unwrap();
    let printed = format!("{store:?}");
    assert!(printed.contains("bucket") && printed.contains("some/prefix"), "{printed}");
    assert!(!printed.contains("s3cret"), "{printed}");
}
