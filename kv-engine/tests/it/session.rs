//! Texts that go on from a file.
use std::path::Path;

use kv_core::StartOptions;
use kv_engine::{SavedText, SessionFileError};
use kv_tier::session;
use kv_tier::{Identity, ModelDigest, SessionError};

use super::*;

fn identity() -> Identity {
    Identity::new(ModelDigest::of_bytes(b"echo"))
}

/// Runs a text, then other texts that may take its room, and saves the first one.
fn save(
    cache: KvCache<CpuBackend>,
    prompt: &[u32],
    others: &[Vec<u32>],
    to: &Path,
) -> (SavedText, u32) {
    let mut model = Echo::certain();
    let mut engine = Engine::new(cache, limits(8, 16));
    let mut tokens = prompt.to_vec();
    for (index, request) in
        requests(&[prompt.to_vec()], 9).into_iter().chain(requests(others, 30)).enumerate()
    {
        engine.submit(request).expect("fits");
        while engine.has_work() {
            for event in engine.step(&mut model).expect("runs") {
                if let Event::Finished { generated, .. } = event
                    && index == 0
                {
                    tokens.extend(generated.tokens);
                }
            }
        }
    }
    let text = SavedText { tokens, drawn: 9 };
    let info = engine.save_session(&identity(), &text, to).expect("saved");
    assert_eq!(engine.cache().state().usage().blocks_used, 0, "nothing is held");
    (text, info.tokens)
}

#[test]
fn a_text_goes_on_with_what_the_file_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chat.kvs");
    let prompt: Vec<u32> = (3..20).collect();
    // Of 26 tokens the last one has no rows yet. Others evict what comes last.
    let others = prompts(3)[1..].to_vec();
    for (reuse, others, has_states, saved) in [
        (PrefixReuse::Partial, vec![], false, 25..=25),
        (PrefixReuse::FullBlocks, vec![], false, 24..=24),
        (PrefixReuse::Partial, others.clone(), false, 0..=24),
        (PrefixReuse::Partial, vec![], true, 25..=25),
        // In front of the prompt's last token.
        (PrefixReuse::FullBlocks, vec![], true, 16..=16),
        (PrefixReuse::Partial, others, true, 0..=24),
    ] {
        let open = || {
            cache_with(4, 12, |spec| {
                let spec = spec.prefix_reuse(reuse);
                if has_states { states::with_states(spec, (4, 0, 6)) } else { spec }
            })
        };
        let (text, rows) = save(open(), &prompt, &others, &path);
        assert!(saved.contains(&rows), "{rows} tokens");
        assert_eq!(text.tokens[prompt.len()..], expected(&prompt, 9));
        let read = SavedText::read(&path).expect("a session");
        assert_eq!(read, text);

        let mut model = Echo::certain();
        let mut engine = Engine::new(open(), limits(8, 16));
        assert_eq!(engine.load_session(&identity(), &path).expect("loaded"), rows);
        engine.submit(Request::new(read.tokens, 11)).expect("fits");
        let mut done = Vec::new();
        while engine.has_work() {
            done.extend(engine.step(&mut model).expect("runs"));
        }
        let Some(Event::Finished { generated, .. }) = done.pop() else { panic!("no end") };
        assert_eq!(generated.tokens, expected(&text.tokens, 11));
        assert_eq!(to_u32(generated.reused), rows);
    }
}

#[test]
fn other_files_are_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chat.kvs");
    let mut engine = Engine::new(cache(4, 12), limits(8, 16));
    assert!(matches!(SavedText::read(&path), Err(SessionFileError::Io(_))));
    let prompt: Vec<u32> = (3..20).collect();
    let (text, _) = save(cache(4, 12), &prompt, &[], &path);

    let other = Identity::new(ModelDigest::of_bytes(b"another"));
    let refused = engine.load_session(&other, &path).expect_err("another model");
    let EngineError::Session(SessionFileError::Refused { path: named, source }) = refused else {
        panic!("{refused}");
    };
    assert!(matches!(*source, SessionError::Model { .. }), "{source}");
    assert_eq!(named, path);
    let refused = engine.save_session(&identity(), &text, &folder.path().join("a/b.kvs"));
    assert!(matches!(refused, Err(EngineError::Session(SessionFileError::Io(_)))), "{refused:?}");
    assert_eq!(engine.cache().state().usage().blocks_used, 0, "nothing is held");

    // Of another program.
    let (mut cache, id) = (cache(4, 12), SequenceId(1));
    cache.start(id, &prompt, StartOptions::default()).expect("a sequence");
    for note in [&b"temperature 0.7"[..], b"{\"rest\":[1]}", b"{\"rest\":[-1],\"drawn\":0}", b""] {
        session::dump(&mut cache, &identity(), id, note, &path).expect("written");
        let refused = SavedText::read(&path).expect_err("not its note");
        assert!(matches!(&refused, SessionFileError::Note { path: named } if *named == path));
    }
    std::fs::write(&path, b"not a session at all").expect("a file");
    let refused = SavedText::read(&path).expect_err("no session");
    let SessionFileError::Refused { source, .. } = refused else { panic!("{refused}") };
    assert!(matches!(*source, SessionError::NotASession { .. }), "{source}");
}

#[test]
fn a_sampler_goes_on_where_it_was() {
    let logits = vec![0.0; 40];
    let draw = |mut sampler: Sampler, count: usize| -> Vec<u32> {
        (0..count).map(|_| sampler.sample(&logits).expect("finite")).collect()
    };
    let all = draw(Sampler::new(1.0, 5, 0), 20);
    assert_eq!(draw(Sampler::new(1.0, 5, 0).after(12), 8), all[12..]);
    assert!(all.iter().any(|token| *token != all[0]));
}
