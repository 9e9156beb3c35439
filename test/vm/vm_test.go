package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

func TestLoadOrder(t *testing.T) {
	index := []byte(`kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet-virtio.ko.xz: kernel/net/9p/9pnet.ko.xz
kernel/net/9p/9pnet.ko.xz: kernel/fs/netfs/netfs.ko.xz
kernel/fs/netfs/netfs.ko.xz:
kernel/fs/fat/fat.ko.xz:
`)
	got := loadOrder(index, "virtio_pci", "9pnet_virtio", "9p")
	want := []string{"kernel/fs/netfs/netfs.ko.xz", "kernel/net/9p/9pnet.ko.xz", "kernel/net/9p/9pnet-virtio.ko.xz",
		"kernel/fs/9p/9p.ko.xz"}
	if !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
}

// TestArchive checks the archive with busybox's cpio.
func TestArchive(t *testing.T) {
	var b bytes.Buffer
	a := archive{w: &b}
	a.folder("modules")
	a.file("modules/000", []byte("five."))
	a.json("job", []string{"four"})
	a.end()
	if a.err != nil {
		t.Fatal(a.err)
	}
	dir := t.TempDir()
	unpack := exec.CommandContext(t.Context(), "busybox", "cpio", "-i")
	unpack.Dir, unpack.Stdin = dir, &b
	if out, err := unpack.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, want := range map[string]string{"modules/000": "five.", "job": `["four"]`} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, want)
		}
	}
}
