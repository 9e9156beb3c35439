package mutation_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const tree = "../.."

// fuzzTime is the time limit of a target's search. Targets find most bugs in the first seconds.
const fuzzTime = 5 * time.Minute

// planted is a bug that a fuzz target must find by searching: no seed of the target triggers it.
type planted struct {
	target   string
	file     string // relative to the source tree
	old, new string // old must occur exactly once in the file
}

func bugs() []planted {
	return []planted{
		{"FuzzSplit", "internal/address/address.go", "Index(low) & MaxIndex", "Index(low) & (MaxIndex >> 1)"},
		{"FuzzParse", "internal/address/address.go", `case a.Zone() != "":`, `case a.Zone() == "eth0":`},
		{
			"FuzzParseKey", "internal/address/cipher.go",
			"case len(s) != 2*len(Key{}):",
			"case len(s) < 2*len(Key{}):",
		},
		{
			"FuzzCipher", "internal/address/cipher.go",
			"c.block.Decrypt(b[:], b[:])",
			`if b[0] != 'a' {
		c.block.Decrypt(b[:], b[:])
	}`,
		},
		{
			"FuzzPlanValidate", "internal/address/plan.go",
			"if p.Base.Overlaps(p.Private) {",
			"if p.Base == p.Private {",
		},
		{"FuzzSubnet", "internal/address/gateway.go", "return lo>>shift | hi<<(64-shift)", "return lo >> shift"},
		{
			"FuzzTenantFile", "internal/agent/tenants.go",
			"if a.ID == 0 || a.ID >= address.FirstReservedApp {",
			"if a.ID == 0 || a.ID > address.FirstReservedApp {",
		},
		{"FuzzNodeFile", "internal/agent/state/node.go", `if f.Name == "" || f.UUID == "" {`, `if f.Name == "" {`},
		{
			"FuzzParseConfig", "internal/cniserver/config.go",
			"if err := tenant.CheckName(name); err != nil {",
			"if err := tenant.CheckName(name); err != nil && len(name) > 63 {",
		},
		{
			"FuzzResult", "internal/cniserver/result.go",
			`addr, err := netip.ParseAddr(a.Address)
		if err != nil {`,
			`addr, err := netip.ParseAddr(a.Address)
		if err != nil && a.Address == "" {`,
		},
		{"FuzzReply", "internal/openflow/field.go", "len(b) < size || masked && size%2 != 0 {", "len(b) < size {"},
		{
			"FuzzFromContainer", "bpf/net/netpila/resolve.h",
			"if (tenant_id(&plain) == id)",
			"if (has_id(own, tenant_id(&plain)))",
		},
		{
			"FuzzFromFabric", "bpf/hooks/uplink.h",
			"crypt(from_id, &source, ENCRYPT)",
			"crypt(to_id, &source, ENCRYPT)",
		},
		{
			"FuzzToFabric", "bpf/common/address.h",
			"return in_base(a) && tenant_id(a);",
			"return in_base(a) && tenant_id(a) && tenant_id(a) != 9;",
		},
		{
			"FuzzFromEdge", "bpf/common/border.h",
			"if (claims_tenant(src))",
			"if (claims_tenant(src) && tenant_id(src) != 9)",
		},
		{
			"FuzzFromPort", "bpf/hooks/host_if.h",
			"__builtin_memcmp(to, reserved, sizeof(reserved))",
			"__builtin_memcmp(to, reserved, sizeof(reserved) - 1)",
		},
		{
			"FuzzToEdge", "bpf/common/border.h",
			"return claims_tenant(src) || is_egress(src) ?",
			"return (claims_tenant(src) && tenant_id(src) != 9) || is_egress(src) ?",
		},
		{
			"FuzzFromNode", "bpf/hooks/node.h",
			"if (skb->ingress_ifindex)",
			"if (skb->ingress_ifindex == node_ifindex)",
		},
		{"FuzzDecodeEvent", "internal/datapath/events.go", "Count: e.Count,", "Count: e.Count & (1<<63 - 1),"},
		{
			"FuzzDeviceID", "internal/datapath/host/names.go",
			"name == DeviceName(endpoint.ID(id))",
			`!strings.HasPrefix(number, "00")`,
		},
		{"FuzzCursor", "internal/endpoint/cursor_load.go", "&& i > f.Reserved {", "&& i > f.Reserved+1 {"},
		{"FuzzParseHostPort", "internal/endpoint/hostport.go", "p.At(), p.Container)", "p.At(), p.Container&0x3ff)"},
		{
			"FuzzDecodeRecord", "internal/endpoint/record.go",
			"r.ID < 1 || r.ID > MaxID:",
			"r.ID < 1 || r.ID > MaxID+1:",
		},
		{
			"FuzzMember", "internal/join/member.go",
			"if err := cert.CheckSignatureFrom(ca); err != nil {",
			"if err := cert.CheckSignatureFrom(ca); err != nil && len(certDER) == 0 {",
		},
		{
			"FuzzToken", "internal/join/token.go",
			`parts[0] != "pilaster"`,
			`!strings.HasPrefix(parts[0], "pilaster")`,
		},
		{
			"FuzzParseSpec", "internal/lab/spec.go",
			"err = s.Validate()",
			`if err = s.Validate(); len(s.Nodes) == 0 {
		err = nil
	}`,
		},
		{
			"FuzzParseAuthority", "internal/orchestrator/pki/pki.go",
			"!ok || !public.Equal(cert.PublicKey)",
			"!ok || public.Equal(nil)",
		},
		{
			"FuzzSignNode", "internal/orchestrator/pki/pki.go",
			"!ok || k.Curve != elliptic.P256()",
			"!ok || k.Curve == elliptic.P224()",
		},
		{"FuzzPageToken", "internal/orchestrator/store/pages.go", "|| prefixName(p) != name {", "{"},
		{
			"FuzzCheckNode", "internal/orchestrator/store/nodes.go",
			"ok = ok && labelForm.MatchString(label)",
			`ok = ok && (label == "" || labelForm.MatchString(label))`,
		},
		{
			"FuzzEvent", "internal/orchestrator/store/sessions.go",
			`s.Orchestrator, text, _ = strings.Cut(text, " ")`,
			`s.Orchestrator, text, _ = strings.Cut(strings.TrimSpace(text), " ")`,
		},
		{
			"FuzzCluster", "internal/orchestrator/store/cluster.go",
			"len(r.JoinSecret) != len(t.Secret)",
			"len(r.JoinSecret) > len(t.Secret)",
		},
		{"FuzzDecode", "internal/packet/decode.go", "if len(b) < icmpHeaderLen {", "if len(b) < icmpHeaderLen-4 {"},
		{"FuzzKernelVersion", "internal/preflight/machine.go", "minor < wantMinor", "minor+1 < wantMinor"},
		{
			"FuzzParseLabels", "internal/tenant/identity.go",
			`k + "=" + labels[k]`,
			`strings.ToLower(k) + "=" + labels[k]`,
		},
		{
			"FuzzDiskState", "internal/agent/disk_state.go",
			"s.Tenants = append(s.Tenants, t)",
			`if len(t.Apps) == 1 {
			t.Name = string(b)
		}
		s.Tenants = append(s.Tenants, t)`,
		},
		{
			"FuzzKnown", "internal/agent/control/convert.go",
			"if id.Id < 1 || id.Id > uint32(address.MaxTenantID) ||",
			"if id.Id < 1 || id.Id > uint32(address.MaxTenantID)+1 ||",
		},
		{
			"FuzzLog", "internal/egress/log.go",
			"b, err := json.Marshal(e)",
			"e.Interface = \"\"; b, err := json.Marshal(e)",
		},
		{
			"FuzzMembership", "internal/agent/state/node.go",
			"if !m.Plan.ContainsNode(m.Prefix) {",
			"if m.Prefix.Bits() != 64 {",
		},
		{
			"FuzzBackup", "internal/orchestrator/store/restore.go",
			"if left > 0 && skip >= left {",
			"if left > 0 && skip > left+1 {",
		},
		{
			"FuzzJSON", "internal/fuzzmutate/fuzzmutate.go",
			"slices.Sorted(maps.Keys(v))",
			"slices.Collect(maps.Keys(v))",
		},
		{
			"FuzzOffload", "bpf/net/nimitz/offload_nsh.h",
			"|| s->outer.vni != o->vni",
			"|| (s->outer.vni ^ o->vni) & 0xff",
		},
		{"FuzzCache", "bpf/oncache/inner.h", "p->hops <= 1", "p->hops == 1"},
		{"FuzzEVPN", "bpf/net/evpn/neighbours.h", "asked != mac_to(to)", "(asked ^ mac_to(to)) >> 40"},
		{
			"FuzzKernelCipher", "bpf/pilaster.bpf.c",
			"slot = bpf_map_lookup_elem(&pil_keys_v1, &id);",
			`params.key[1] &= 0x7f;
	slot = bpf_map_lookup_elem(&pil_keys_v1, &id);`,
		},
		{
			"FuzzCall", "internal/cniserver/call.go",
			"if err := utils.ValidateInterfaceName(c.name); err != nil {",
			"if err := utils.ValidateInterfaceName(c.name); err != nil && len(c.name) > 15 {",
		},
		{"FuzzSocket", "internal/cniclient/socket.go", "c += 9", "c += 8"},
		{
			"FuzzAnswer", "internal/cniclient/http.go",
			`!strings.HasPrefix(version, "HTTP/1.")`,
			`!strings.HasPrefix(version, "HTTP/")`,
		},
		{"FuzzRefusal", "internal/cniclient/text.go", "case r < ' ':", "case r < 31:"},
		{"FuzzReadMatrix", "internal/nic/matrix.go", "err != nil || packets == 0 {", "err != nil {"},
		{
			"FuzzMountinfo", "internal/datapath/host/bpffs.go",
			"kind[1] != mountSource",
			"!strings.HasPrefix(kind[1], mountSource)",
		},
		{
			"FuzzManifests", "internal/service/manifest.go",
			"case *c.ClientIP.TimeoutSeconds < 1 ||",
			"case *c.ClientIP.TimeoutSeconds < 0 ||",
		},
		{"FuzzPolicies", "internal/policy/networkpolicy.go", "last < p.Port.IntVal {", "last < p.Port.IntVal-1 {"},
	}
}

// TestEveryFuzzTargetFindsABug plants each bug, and runs the fuzz target until it finds the bug.
func TestEveryFuzzTargetFindsABug(t *testing.T) {
	all := os.Getenv("MUTATION") == "all"
	tried := []string{"FuzzSplit"} // without MUTATION=all
	for _, b := range bugs() {
		if all || slices.Contains(tried, b.target) {
			t.Run(b.target, b.mustBeFound)
		}
	}
}

func (b planted) mustBeFound(t *testing.T) {
	folder, binary := filepath.Dir(b.file), filepath.Join(t.TempDir(), "fuzz")
	bad := strings.Replace(b.text(t), b.old, b.new, 1)
	overlay := ""
	header, found := strings.CutPrefix(b.file, "bpf/")
	switch {
	case strings.HasPrefix(header, "oncache/"):
		folder = "internal/oncache"
		overlay = compileIn(t, filepath.Join(tree, folder), header, bad)
	case strings.HasPrefix(header, "net/evpn/"):
		folder = "internal/network/evpn/tables"
		overlay = compileIn(t, filepath.Join(tree, folder), header, bad)
	case found:
		folder, overlay = "internal/datapath", compile(t, header, bad)
	default:
		overlay = overlayOf(t, filepath.Join(tree, b.file), bad)
	}
	// Run the binary, which writes failing inputs to its working folder; `go test -fuzz` would write them to the tree.
	build := exec.CommandContext(t.Context(), "go", "test", "-c", "-fuzz", "^"+b.target+"$", "-vet=off",
		"-overlay", overlay, "-o", binary, "./"+folder)
	build.Dir = tree
	if said, err := build.CombinedOutput(); err != nil {
		t.Fatalf("the source with the bug does not compile: %v\n%s", err, said)
	}
	seeds := exec.CommandContext(t.Context(), binary, "-test.run=^"+b.target+"$")
	seeds.Dir = t.TempDir()
	if said, err := seeds.CombinedOutput(); err != nil {
		t.Fatalf("a seed triggers the bug, so the search proves nothing: %v\n%s", err, said)
	}
	start := time.Now()
	run := exec.CommandContext(t.Context(), binary, "-test.run=^$", "-test.fuzz=^"+b.target+"$",
		"-test.fuzztime="+fuzzTime.String(), "-test.fuzzminimizetime=10x", "-test.fuzzcachedir="+t.TempDir())
	run.Dir = t.TempDir()
	said, err := run.CombinedOutput()
	var failed *exec.ExitError
	if !errors.As(err, &failed) || !bytes.Contains(said, []byte("--- FAIL: "+b.target)) {
		t.Fatalf("not found in %v: %v\n%s", time.Since(start).Round(time.Second), err, said)
	}
	t.Logf("found by searching for %v", time.Since(start).Round(100*time.Millisecond))
}

// overlayOf writes an overlay with which go compiles the given text instead of a file.
func overlayOf(t *testing.T, file, text string) string {
	t.Helper()
	file, err := filepath.Abs(file)
	must(t, err)
	dir := t.TempDir()
	instead, overlay := filepath.Join(dir, filepath.Base(file)), filepath.Join(dir, "overlay.json")
	must(t, os.WriteFile(instead, []byte(text), 0o600))
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {file: instead}})
	must(t, err)
	must(t, os.WriteFile(overlay, replace, 0o600))
	return overlay
}

func (b planted) text(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(tree, b.file))
	must(t, err)
	return string(text)
}

// TestEveryFuzzTargetHasABug: each target of the tree is in the table, and each bug can be planted.
func TestEveryFuzzTargetHasABug(t *testing.T) {
	var known []string
	for _, b := range bugs() {
		if n := strings.Count(b.text(t), b.old); n != 1 {
			t.Errorf("%s: found %d times in %s, want once:\n%s", b.target, n, b.file, b.old)
		}
		known = append(known, b.target)
	}
	target := regexp.MustCompile(`(?m)^func (Fuzz\w*)\(`)
	var there []string
	must(t, filepath.WalkDir(tree, func(path string, entry os.DirEntry, err error) error {
		if err == nil && path == filepath.Join(tree, "dist") { // after make generated, it has a copy of the tree
			return filepath.SkipDir
		}
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, found := range target.FindAllSubmatch(text, -1) {
			there = append(there, string(found[1]))
		}
		return err
	}))
	slices.Sort(known)
	slices.Sort(there)
	if len(there) < 25 {
		t.Errorf("the tree has %d fuzz targets, expected 25 or more", len(there))
	}
	if !slices.Equal(known, there) {
		t.Errorf("the table has bugs for\n%q, but the fuzz targets are\n%q", known, there)
	}
}
