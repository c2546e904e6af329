//! What a test must not leave behind.

use std::time::{Duration, Instant};

/// A limit that only a hang reaches.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Descriptors and threads of this process when it was made; checked when dropped, as are processes and files of ours.
pub(crate) struct Footprint {
    counts: (usize, usize),
}

fn counts() -> (usize, usize) {
    let entries = |dir| std::fs::read_dir(dir).unwrap().count();
    (entries("/proc/self/fd"), entries("/proc/self/task"))
}

impl Footprint {
    pub(crate) fn of_this_process() -> Footprint {
        Footprint { counts: counts() }
    }
}

impl Drop for Footprint {
    fn drop(&mut self) {
        // Counts mean something only when no other test runs in this process.
        if std::thread::panicking() || std::env::var_os("NEXTEST").is_none() {
            return;
        }
        let start = Instant::now();
        // A joined thread may still be on its way out of /proc.
        while counts() != self.counts && start.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(counts(), self.counts, "(descriptors, threads)");
        assert!(children().is_empty(), "processes left: {:?}", children());
        let shm = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let ours = shm.filter(|entry| entry.file_name().to_string_lossy().contains("kvf")).count();
        assert_eq!(ours, 0, "files in /dev/shm");
    }
}

/// Living or unreaped children of this process.
fn children() -> Vec<String> {
    let own = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    processes
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok())
        .filter(|stat| {
            let after = stat.rfind(')').map_or("", |at| &stat[at + 1..]);
            after.split_whitespace().nth(1) == Some(&own)
        })
        .collect()
}
