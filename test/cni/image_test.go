package cni_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// image is the only image, for containers and sandboxes: busybox, which sleeps if there is no command.
const image = "pilaster.test/busybox:1"

// writeImage creates a docker archive of the machine's static busybox, so that no registry is needed, and returns its
// path.
func writeImage(t *testing.T) string {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	layer := archive(t, file{"bin/busybox", 0o755, busybox})
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": runtime.GOOS,
		"config": map[string]any{"Entrypoint": []string{"/bin/busybox", "sleep", "1000000"}},
		"rootfs": map[string]any{"type": "layers",
			"diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{image},
		"Layers": []string{"layer.tar"}}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "image.tar")
	b := archive(t, file{"manifest.json", 0o644, manifest}, file{"config.json", 0o644, config},
		file{"layer.tar", 0o644, layer})
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

type file struct {
	name    string
	mode    int64
	content []byte
}

func archive(t *testing.T, files ...file) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
