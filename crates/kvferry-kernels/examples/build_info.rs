//! Prints how the kernels were built, as JSON: `cargo run -p kvferry-kernels --example build_info`.
#![allow(clippy::print_stdout)]

fn main() {
    let info = kvferry_kernels::build_info();
    println!(
        "{{\"available\": {}, \"cuda_mode\": {:?}, \"toolkit\": {}, \"archs\": {:?}, \"profile\": {:?}, \
         \"fatbin_bytes\": {}}}",
        kvferry_kernels::available(),
        info.cuda_mode,
        info.toolkit.map_or_else(|| "null".to_owned(), |toolkit| format!("{toolkit:?}")),
        info.archs,
        info.profile,
        info.fatbin_bytes,
    );
}
