# Every target does its own set-up. It only needs cargo (Rust 1.88 or later) and Linux with io_uring.
#
# Profiles: tests and lints use `dev` (opt-level 1, debug assertions), which is built once for all.
# demo, bench, install and the test that counts instructions use `release`.

CARGO ?= cargo
STRIP ?= strip
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
DESTDIR ?=
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
UDM := $(TARGET_DIR)/release/udm
# The archive from which libudm is linked.
ARCHIVE ?= $(TARGET_DIR)/release/libudm.a
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# The maintainer of the Debian packages, as `Name <address>`. It must be set for packages that are
# published. The default is the name in git's configuration, and is good for local use only.
DEB_MAINTAINER ?= $(or $(shell git config user.name),udm developers) <$(or $(shell git config user.email),root@localhost)>
# The time of the files in packages. The default is the last commit.
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

# program:Debian package, for tests with real clients. A test whose program is missing reports this and passes.
TEST_PROGRAMS := fio:fio curl:curl python3:python3 nbdkit:nbdkit nbdinfo:libnbd-bin qemu-io:qemu-utils fusermount3:fuse3 mkfs.ext4:e2fsprogs \
    fuse2fs:fuse2fs sqlite3:sqlite3 valgrind:valgrind pkg-config:pkg-config openssl:openssl strace:strace ip:iproute2 chromedriver:chromium-driver \
    dpkg-shlibdeps:dpkg-dev

# Cargo must not count as a job of make.
CARGO_TEST := MAKEFLAGS= $(CARGO) test --locked
# Crates with tests that try every order of atomic accesses.
LOOM_CRATES := udm-core udm-runtime udm-queue udm-targets udm-frontends
comma := ,
space := $(subst ,, )

LAB ?= lab.html
SBOM ?= $(TARGET_DIR)/sbom.cdx.json

.PHONY: help build library demo lab test test-a-to-l test-m-to-z test-others test-planted-bugs test-programs lint bench install install-files install-library fio-engine sbom deb \
    deb-files clean

help:
	@echo 'make build    the program, as $(UDM)'
	@echo 'make demo     a demonstration, in about a minute'
	@echo 'make test     all tests; as root on Debian it installs the clients for them'
	@echo 'make lint     formatting and clippy, as CI checks them'
	@echo 'make bench    udm compared with the one-mutex design, the bare device and other servers'
	@echo 'make lab      the experiments on which udm is based, with their references, as $(LAB)'
	@echo 'make install  program, man pages, completions, lib/udm/dmsetup, lib/udm/vhost-user-blk and libudm under PREFIX ($(PREFIX))'
	@echo 'make fio-engine  an engine for the installed fio, as $(TARGET_DIR)/fio/udm.so'
	@echo 'make sbom     the dependencies of the program and of libudm as CycloneDX, in $(SBOM)'
	@echo 'make deb      packages for Debian, with units for systemd, in $(TARGET_DIR)/debian'

build:
	$(CARGO) build --release --locked -p udm

library:
	$(CARGO) build --release --locked -p udm-capi

demo: build
	$(UDM) demo

bench: build
	$(UDM) bench --compare
	$(UDM) bench --snapshots
	benches/nbd.sh $(UDM)
	benches/snapshots.sh $(UDM)

# The experiment fio is left out if its engine cannot be built.
lab: build
	@if $(MAKE) fio-engine; then engine='--fio-engine $(TARGET_DIR)/fio/udm.so'; \
	else echo 'make lab: no engine for fio, so the experiment fio is left out'; fi; \
	$(UDM) lab run --html $(LAB) $$engine

# The tests of the workspace mostly wait. So two halves of them, by the names of the programs, run at
# a time, and the others are built and run beside them.
test: test-programs
	$(CARGO_TEST) --workspace --no-run
	$(MAKE) -j3 test-a-to-l test-m-to-z test-others

test-a-to-l:
	$(CARGO_TEST) --workspace --test '[a-l]*'

test-m-to-z:
	$(CARGO_TEST) --workspace --lib --bins --test '[m-z]*'
	$(CARGO_TEST) --workspace --doc

test-others: test-planted-bugs
	$(CARGO_TEST) $(addprefix -p ,$(LOOM_CRATES)) \
	    --features $(subst $(space),$(comma),$(addsuffix /loom,$(LOOM_CRATES))) --lib loom
	$(CARGO_TEST) --release -p udm-backends --test instructions

# Bugs that the simulator and the conformance battery must find, as patches on a copy of the tree.
# With the whole workspace, crates from outside have the features with which they are built already.
test-planted-bugs:
	planted-bugs/apply $(TARGET_DIR)/planted
	$(CARGO_TEST) --manifest-path $(TARGET_DIR)/planted/Cargo.toml --target-dir $(TARGET_DIR) \
	    --workspace --features udm-sim/interleave --test planted_bugs

test-programs:
	@missing() { \
	    for pair in $(TEST_PROGRAMS); do \
	        PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null 2>&1 || printf ' %s' "$${pair##*:}"; \
	    done; \
	}; \
	packages=$$(missing); \
	if [ -n "$$packages" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then \
	    echo "Installing packages for tests with real clients:$$packages"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    { apt-get update -q && apt-get install -qq -y --no-install-recommends $$packages; } >/dev/null 2>&1 || true; \
	    packages=$$(missing); \
	fi; \
	if [ -n "$$packages" ]; then echo "Not installed, so the tests that use them are skipped:$$packages"; fi

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

install: build library
	$(MAKE) install-files

# Installs an existing program and archive: UDM and ARCHIVE.
install-files: install-library
	install -D -m 755 $(UDM) $(DESTDIR)$(PREFIX)/bin/udm
	$(STRIP) $(DESTDIR)$(PREFIX)/bin/udm
	install -d $(DESTDIR)$(PREFIX)/lib/udm
	ln -sf ../../bin/udm $(DESTDIR)$(PREFIX)/lib/udm/dmsetup
	ln -sf ../../bin/udm $(DESTDIR)$(PREFIX)/lib/udm/vhost-user-blk
	install -d $(DESTDIR)$(PREFIX)/share/qemu/vhost-user
	sed -e 's,@PREFIX@,$(PREFIX),' packaging/50-udm-blk.json.in > $(DESTDIR)$(PREFIX)/share/qemu/vhost-user/50-udm-blk.json
	$(UDM) generate man $(TARGET_DIR)/man
	install -d $(DESTDIR)$(PREFIX)/share/man/man1 $(DESTDIR)$(PREFIX)/share/man/man5
	install -m 644 $(TARGET_DIR)/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -m 644 $(TARGET_DIR)/man/*.5 $(DESTDIR)$(PREFIX)/share/man/man5/
	$(UDM) generate completions $(TARGET_DIR)/completions
	install -D -m 644 $(TARGET_DIR)/completions/udm.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/udm
	install -D -m 644 $(TARGET_DIR)/completions/udm.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/udm.fish
	install -D -m 644 $(TARGET_DIR)/completions/_udm $(DESTDIR)$(PREFIX)/share/zsh/site-functions/_udm

# Installs only the library, from an existing archive.
install-library:
	install -d $(DESTDIR)$(LIBDIR)/pkgconfig
	crates/udm-capi/link $(ARCHIVE) $(DESTDIR)$(LIBDIR)/libudm.so.0
	chmod 644 $(DESTDIR)$(LIBDIR)/libudm.so.0
	ln -sf libudm.so.0 $(DESTDIR)$(LIBDIR)/libudm.so
	install -m 644 $(ARCHIVE) $(DESTDIR)$(LIBDIR)/libudm.a
	$(STRIP) --strip-debug $(DESTDIR)$(LIBDIR)/libudm.so.0 $(DESTDIR)$(LIBDIR)/libudm.a
	install -D -m 644 crates/udm-capi/include/udm.h $(DESTDIR)$(PREFIX)/include/udm.h
	sed -e 's,@PREFIX@,$(PREFIX),' -e 's,@LIBDIR@,$(LIBDIR),' -e 's,@VERSION@,$(VERSION),' packaging/udm.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/udm.pc

# For local use, not for a package: the engine is built with headers under the GPL.
fio-engine: library
	engines/fio/build $(ARCHIVE) $(TARGET_DIR)/fio

sbom:
	mkdir -p $(dir $(SBOM))
	SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) packaging/dependencies sbom > $(SBOM)

# Programs name the files of their sources, such as those below the folder of cargo.
deb: export RUSTFLAGS += --remap-path-prefix=$(or $(CARGO_HOME),$(HOME)/.cargo)=/cargo --remap-path-prefix=$(CURDIR)=/udm
deb: build library
	$(MAKE) deb-files

# Makes the packages of an existing program and archive: UDM and ARCHIVE.
deb-files: DEB = $(abspath $(TARGET_DIR))/debian
deb-files:
	rm -rf $(DEB)
	$(MAKE) install-files PREFIX=/usr LIBDIR=/usr/lib/$$(dpkg-architecture -qDEB_HOST_MULTIARCH) DESTDIR=$(DEB)/stage
	$(MAKE) sbom SBOM=$(DEB)/stage/usr/share/doc/udm/sbom.cdx.json
	packaging/dependencies notices > $(DEB)/stage/usr/share/doc/udm/third-party-notices
	SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) DEB_MAINTAINER='$(subst ','\'',$(DEB_MAINTAINER))' \
	    packaging/debian/build $(UDM) $(DEB)/stage $(DEB)

clean:
	$(CARGO) clean
