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

// FuzzMember: an accepted file has a key, the certificate of this key, and the authority that signed the certificate.
// Describe returns both certificates.
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
	keyEnd := []byte("KEY-----\n")
	one, other := bytes.SplitAfterN(saved[0], keyEnd, 3), bytes.SplitAfterN(saved[1], keyEnd, 3)
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
			t.Fatal("accepted a certificate of another key or authority")
		}
		all, err := Describe(dir)
		if err != nil || len(all) != 2 || all[0].SHA256 != fmt.Sprintf("%x", sha256.Sum256(m.cert.Raw)) ||
			all[1].SHA256 != fmt.Sprintf("%x", m.caSum()) {
			t.Fatalf("Describe returned %+v, %v; want the node's certificate and the authority's", all, err)
		}
		if err := m.save(dir); err != nil {
			t.Fatal(err)
		}
		if back, err := load(dir); err != nil || !back.key.Equal(m.key) || !back.cert.Equal(m.cert) ||
			!back.ca.Equal(m.ca) {
			t.Fatalf("the file is different after save and load: %v", err)
		}
	})
}
