package join

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// FuzzMember: a file that is accepted holds a key, its certificate and the authority of that, and those are told.
func FuzzMember(f *testing.F) {
	dir := f.TempDir()
	path := filepath.Join(dir, MemberFile)
	var saved [][]byte
	for _, name := range []string{"n1", "n2"} {
		if err := newTestMember(f, name, "u1", time.Now().Add(time.Hour)).save(dir); err != nil {
			f.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		saved = append(saved, text)
	}
	f.Add(saved[0])
	f.Add(saved[0][:len(saved[0])-10])
	one, other := bytes.SplitAfterN(
		saved[0],
		[]byte("KEY-----\n"),
		3,
	), bytes.SplitAfterN(
		saved[1],
		[]byte("KEY-----\n"),
		3,
	)
	f.Add(append(bytes.Join(one[:2], nil), other[2]...)) // the key of one, the certificates of the other
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := load(dir)
		if err != nil {
			return
		}
		if !m.key.PublicKey.Equal(m.cert.PublicKey) || m.cert.CheckSignatureFrom(m.ca) != nil {
			t.Fatal("key, certificate and authority do not belong together")
		}
		told, err := Describe(dir)
		if err != nil || len(told) != 2 || told[0].SHA256 != fmt.Sprintf("%x", sha256.Sum256(m.cert.Raw)) ||
			told[1].SHA256 != fmt.Sprintf("%x", m.caSum()) {
			t.Fatalf("what is told of it is %+v, %v", told, err)
		}
		if err := m.save(dir); err != nil {
			t.Fatal(err)
		}
		if back, err := load(dir); err != nil || !back.key.Equal(m.key) || !back.cert.Equal(m.cert) ||
			!back.ca.Equal(m.ca) {
			t.Fatalf("became another: %v", err)
		}
	})
}
