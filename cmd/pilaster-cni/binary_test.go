package main_test

import (
	"os/exec"
	"strings"
	"testing"
)

// The plugin runs without Go's runtime, so it must not link packages with initializers, such as os and fmt.
func TestDependencies(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	packages := strings.Fields(string(out))
	own := 0
	for _, p := range packages {
		switch {
		case strings.HasPrefix(p, "pilaster.io/"):
			own++
		case strings.Contains(p, "."),
			p == "os",
			p == "fmt",
			p == "net",
			p == "time",
			p == "reflect",
			p == "context",
			strings.HasPrefix(p, "encoding/"):
			t.Errorf("the plugin links %s", p)
		}
	}
	if own != 2 {
		t.Errorf("the plugin links %d packages of the project, want 2: %v", own, packages)
	}
}
