//! Generates text for two prompts over one cache, token by token.
//!
//! `cargo run --release -p kv-runner --example generate -- [MODEL_DIR [DEVICE]]`
//!
//! `kv-runner/tests/data/make_models.py --write MODEL_DIR qwen3_5_text` writes a tiny hybrid model.
#![expect(clippy::print_stdout, reason = "an example, which prints")]
use std::error::Error;
use std::path::{Path, PathBuf};

use kv::Device;
use kv::engine::{Engine, Event, Request};
use kv_runner::{CacheOptions, Decoder, Layout, TextStream, Tokenizer};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let bundled = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let dir = args.next().map_or_else(bundled, PathBuf::from);
    let model = Decoder::read(&dir)?;
    let tokenizer = Tokenizer::read(&dir.join("tokenizer.json"))?;

    // 64 blocks of 16 tokens, K in 8 bits and V in 4, on the given device.
    let mut options = CacheOptions::new(Layout::Paged { block_size: 16, num_blocks: 64 });
    options.stored = "int8/l4".parse()?;
    let device = Device::open(args.next().as_deref().unwrap_or("cpu"))?;
    let cache = options.open(&model, device, None)?;

    let mut engine = Engine::new(cache, model.config().limits());
    let mut texts = Vec::new();
    for prompt in ["Once upon a time", "Once upon a time, there was a dog"] {
        let tokens = tokenizer.encode(prompt, model.config())?.tokens;
        texts.push((TextStream::after(&tokens), prompt.to_owned()));
        engine.submit(Request::new(tokens, 40))?;
    }
    while engine.has_work() {
        for event in engine.step(&model)? {
            match event {
                Event::Token { index, token } => {
                    let (stream, text) = &mut texts[index];
                    text.push_str(&stream.push(&tokenizer, token)?);
                }
                Event::Finished { index, generated } => {
                    let (stream, text) = &mut texts[index];
                    text.push_str(&stream.finish(&tokenizer)?);
                    println!("{text}\n  {} prompt tokens reused\n", generated.reused);
                }
                _ => {}
            }
        }
    }
    println!("{:.0} tokens/s", engine.stats().tokens_per_s());
    Ok(())
}
