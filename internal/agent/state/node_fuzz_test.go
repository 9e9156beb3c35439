package state

import (
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/fuzzmutate"
)

// FuzzNodeFile: a node starts only from a file with a complete identity, and a second start has the same identity.
func FuzzNodeFile(f *testing.F) {
	files := []string{
		`{"version":1,"name":"n1","uuid":"u1"}`,
		`{"version":1,"name":"n1","uuid":"u1","starts":4294967294,"cluster":{"uuid":"c",` +
			`"prefix":"fd70:696c:6100:1::/64","basePrefix":"fd70:696c:6100::/40","privatePrefix":"fc00::/8"}}`,
		`{"version":1,"name":"n1","uuid":"u1","cluster":{"uuid":"c","prefix":"fd70:696c:6200:1::/64",` +
			`"basePrefix":"fd70:696c:6100::/40","privatePrefix":"fc00::/8"}}`,
		`{"version":2,"name":"n1","uuid":"u1"}`, ``,
	}
	for _, text := range files {
		f.Add([]byte(text), fuzzmutate.Nothing)
	}
	dir := f.TempDir()
	path := filepath.Join(dir, NodeFileName)
	f.Fuzz(func(t *testing.T, text, script []byte) {
		writeFuzzed(t, path, fuzzmutate.JSON(text, script, files[:2]...))
		n, err := OpenNode(dir, "n1")
		if err != nil {
			return
		}
		m, joined := n.Membership()
		if n.Name() != "n1" || n.UUID() == "" ||
			joined && (m.ClusterUUID == "" || m.Plan.Validate() != nil || !m.Plan.ContainsNode(m.Prefix)) {
			t.Fatalf("node %q with UUID %q in %+v", n.Name(), n.UUID(), m)
		}
		again, err := OpenNode(dir, "n1")
		if err != nil || again.UUID() != n.UUID() || again.file.Starts != n.file.Starts+1 {
			t.Fatalf("the next start has %+v, %v; this one had %+v", again, err, &n.file)
		}
		if is, _ := again.Membership(); is != m {
			t.Fatalf("the next start is in %+v, this one was in %+v", is, m)
		}
	})
}

// FuzzMembership: a node joins a cluster only if the orchestrator's answer is usable and can be stored.
func FuzzMembership(f *testing.F) {
	text, err := protojson.Marshal(&pilasterv1.RegisterResponse{
		Node: &pilasterv1.Node{Prefix: "fd70:696c:6100:1::/64"}, ClusterUuid: "c",
		Plan: &pilasterv1.Plan{
			BasePrefix:      "fd70:696c:6100::/40",
			PrivatePrefix:   "fc00::/8",
			GatewayPrefixes: []string{"100.64.0.0/10", "fd70:696c:6700::/48"},
		},
	})
	if err != nil {
		f.Fatal(err)
	}
	good := string(text)
	f.Add(text, fuzzmutate.Nothing)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text, script []byte) {
		said := new(pilasterv1.RegisterResponse)
		if protojson.Unmarshal(fuzzmutate.JSON(text, script, good), said) != nil {
			return
		}
		m, err := MembershipFromProto(proto.CloneOf(said))
		if err != nil {
			return
		}
		os.Remove(filepath.Join(dir, NodeFileName))
		os.Remove(filepath.Join(dir, gatewaysFileName))
		os.Remove(filepath.Join(dir, reservedFileName))
		n, err := OpenNode(dir, "n1")
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Join(m); err != nil {
			if _, joined := n.Membership(); joined {
				t.Fatalf("refused and joined: %v", err)
			}
			return
		}
		again, err := OpenNode(dir, "n1")
		if err != nil {
			t.Fatalf("joined by %v and does not start again: %v", said, err)
		}
		if is, joined := again.Membership(); !joined || is != m || is.Plan.Validate() != nil ||
			!is.Plan.ContainsNode(is.Prefix) ||
			is.ClusterUUID == "" ||
			is.ClusterUUID != said.ClusterUuid ||
			is.Prefix.String() != said.Node.Prefix && is.Prefix.Bits() != 64 {
			t.Fatalf("%v became %+v", said, is)
		}
	})
}

func writeFuzzed(t *testing.T, path string, text []byte) {
	t.Helper()
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
