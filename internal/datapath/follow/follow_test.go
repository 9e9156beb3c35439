package follow

import (
	"errors"
	"os"
	"testing"

	"github.com/cilium/ebpf"
)

// TestVerifier: the kernel accepts the programs.
func TestVerifier(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	spec, err := loadObject()
	if err != nil {
		t.Fatal(err)
	}
	c, err := ebpf.NewCollection(spec)
	if v := new(ebpf.VerifierError); errors.As(err, &v) {
		t.Fatalf("%+v", v)
	}
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}
