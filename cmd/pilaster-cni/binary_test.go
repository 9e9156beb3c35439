package main_test

import (
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The plugin is started for every container: it stays small, and what only daemons need stays out.
func TestBinaryIsSmall(t *testing.T) {
	plugin := filepath.Join(t.TempDir(), "pilaster-cni")
	if out, err := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", plugin, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	file, err := os.Stat(plugin)
	if err != nil {
		t.Fatal(err)
	}
	if file.Size() > 8<<20 {
		t.Errorf("the plugin has %d bytes, more than 8 MiB", file.Size())
	}
	info, err := buildinfo.ReadFile(plugin)
	if err != nil {
		t.Fatal(err)
	}
	var modules []string
	for _, m := range info.Deps {
		modules = append(modules, m.Path)
	}
	if !slices.Contains(modules, "github.com/containernetworking/cni") {
		t.Errorf("the plugin links no CNI library: looked at the wrong file? It links %v", modules)
	}
	for _, m := range modules {
		if strings.HasPrefix(m, "go.etcd.io/") || m == "github.com/cilium/ebpf" {
			t.Errorf("the plugin links %s", m)
		}
	}
}
