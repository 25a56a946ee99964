//! Clients of others: the `openai` package of Python, and a browser.
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::{Completion, Trial};

use crate::server::{Server, chat_model, script};

/// The browser, if the page shall be opened.
const BROWSER: &str = "KV_SERVE_BROWSER";

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::ignorable_test("public/openai_package", || Ok(with_openai(endpoints))),
        Trial::ignorable_test("public/openai_package_and_a_full_queue", || Ok(with_openai(busy))),
        Trial::ignorable_test("public/the_page_in_a_browser", || Ok(in_browser())),
    ]
}

fn with_openai(run: fn(&Path)) -> Completion {
    let python = python();
    let has_package = Command::new(&python).args(["-c", "import openai"]).output();
    if !has_package.is_ok_and(|output| output.status.success()) {
        let why = "the package openai is not installed, get it with `cargo xtask setup`";
        return Completion::ignored_with(why);
    }
    run(&python);
    Completion::Completed
}

/// Returns the interpreter of the environment that `cargo xtask setup` fills.
fn python() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/servers/bin/python")
}

fn run(command: &mut Command) {
    let output = command.output().expect("Python starts");
    let streams = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success(), "{}\n{}", streams[0], streams[1]);
}

fn endpoints(python: &Path) {
    let folder = chat_model();
    let model = folder.path().to_str().expect("UTF-8");
    let server = Server::start(&["--model", model, "--api-key", "key"]);
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
    let mut command = Command::new(python);
    command.arg(script("openai_client.py")).arg(server.url()).arg(bundled);
    run(command.args(["Models", "Completions", "Chats"]));
    server.end();
}

fn busy(python: &Path) {
    let server = Server::start(&["--max-queue", "1", "--max-batch", "1"]);
    let mut command = Command::new(python);
    run(command.arg(script("openai_client.py")).args([&server.url(), "", "Busy"]));
    server.end();
}

fn in_browser() -> Completion {
    let Ok(browser) = std::env::var(BROWSER) else {
        return Completion::ignored_with(format!("{BROWSER} names no browser"));
    };
    let server = Server::start(&["--api-key", "key", "--paged", "16,64"]);
    let mut command = Command::new("python3");
    run(command.arg(script("page.py")).args([&server.url(), "key", &browser]));
    server.end();
    Completion::Completed
}
