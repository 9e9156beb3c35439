package ops_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/join"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// writings returns the forms in which a text could contain a secret, without spaces and in lower case. A value of four
// bytes could occur in other text by chance, so the test only searches for it as a complete number or string.
func writings(secret []byte) []string {
	all := []string{hex.EncodeToString(secret)}
	var decimal, hexadecimal []string
	for _, b := range secret {
		decimal = append(decimal, fmt.Sprint(b))
		hexadecimal = append(hexadecimal, fmt.Sprintf("0x%x", b))
	}
	all = append(all, strings.Join(decimal, ","), strings.Join(decimal, ""), strings.Join(hexadecimal, ","),
		strings.ReplaceAll(fmt.Sprintf("% x", secret), " ", ":"))
	if len(secret) == 4 {
		all = append(all, base64.StdEncoding.EncodeToString(secret), base64.URLEncoding.EncodeToString(secret))
		for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
			word := order.Uint32(secret)
			all = append(all, fmt.Sprint(word), fmt.Sprint(int32(word)), fmt.Sprintf("%x", word))
		}
		return plainly(all)
	}
	// Base64 as part of longer data: the secret can begin at any of the three offsets in a group of three bytes.
	all = append(all, string(secret))
	for before := range 3 {
		text := base64.StdEncoding.EncodeToString(append(make([]byte, before), secret...))
		text = strings.TrimRight(text, "=")[before*2 : (before+len(secret))*8/6]
		all = append(all, text, strings.NewReplacer("+", "-", "/", "_").Replace(text))
	}
	for half := range slices.Chunk(secret, 8) {
		if len(half) < 8 {
			continue
		}
		for _, order := range []binary.ByteOrder{binary.LittleEndian, binary.BigEndian} {
			all = append(all, fmt.Sprint(order.Uint64(half)), fmt.Sprintf("%x", order.Uint64(half)))
		}
	}
	if a, ok := netip.AddrFromSlice(secret); ok {
		all = append(all, a.String())
	}
	return plainly(all)
}

func plainly(all []string) []string {
	for i, w := range all {
		all[i] = plain(w)
	}
	return all
}

// plain normalizes text for comparisons: lower case and without spaces.
func plain(s string) string {
	return strings.ToLower(strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return -1
		}
		return r
	}, s))
}

// leaks returns a line for each secret that a file contains.
func leaks(files map[string][]byte, secrets map[string][]byte) []string {
	var found []string
	for file, content := range files {
		text := plain(string(content))
		for name, secret := range secrets {
			if bytes.Contains(content, secret) {
				found = append(found, fmt.Sprintf("%s has %s unencoded", file, name))
			}
			for _, w := range writings(secret) {
				if strings.Contains(text, w) {
					found = append(found, fmt.Sprintf("%s has %s as %q", file, name, w))
				}
			}
		}
	}
	return found
}

// TestLeaksAreFound: leaks finds a secret in every form.
func TestLeaksAreFound(t *testing.T) {
	secret := []byte{0xd3, 0x5b, 0x07, 0xff, 0xfe, 0x10, 0x99, 0xa1, 0x00, 0xc2, 0x77, 0x31, 0xee, 0x5d, 0x62, 0x8f}
	array, err := json.MarshalIndent(struct{ Key [16]byte }{[16]byte(secret)}, "", "  ")
	must(t, err)
	longer := append(append([]byte("ab"), secret...), "after it"...)
	for name, text := range map[string]string{
		"raw": string(longer), "hex": fmt.Sprintf("%X", longer), "hex of pairs": fmt.Sprintf("% x", secret),
		"array": string(array), "Go's": fmt.Sprint(secret), "Go's syntax": fmt.Sprintf("%#v", secret),
		"base64": base64.StdEncoding.EncodeToString(longer), "URL": base64.RawURLEncoding.EncodeToString(longer[1:]),
		"URL at 0": base64.URLEncoding.EncodeToString(longer[2:]),
		"word":     fmt.Sprint(binary.NativeEndian.Uint64(secret[8:])),
		"address":  netip.AddrFrom16([16]byte(secret)).String(),
	} {
		if len(leaks(map[string][]byte{"x": []byte("before " + text + " after")},
			map[string][]byte{"key": secret})) == 0 {
			t.Errorf("%s is not found in %q", name, text)
		}
	}
	mark := secret[:4]
	for _, text := range []any{
		mark, string(mark), fmt.Sprintf("%#v", mark), binary.LittleEndian.Uint32(mark),
		int32(binary.LittleEndian.Uint32(mark)), fmt.Sprintf("% x", mark),
		fmt.Sprintf("%#x", binary.LittleEndian.Uint32(mark)), fmt.Sprintf("%x", mark),
		base64.StdEncoding.EncodeToString(mark),
	} {
		if len(leaks(map[string][]byte{"x": fmt.Appendf(nil, "before %v after", text)},
			map[string][]byte{"mark": mark})) == 0 {
			t.Errorf("%v is not found", text)
		}
	}
}

// secrets returns the secrets of a node and its cluster.
func (n *node) secrets(ctx context.Context, t *testing.T) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	resp, err := n.Operator().GetTenant(ctx,
		connect.NewRequest(&pilasterv1.GetTenantRequest{Name: "blue", ShowKey: true}))
	must(t, err)
	all["blue's key"] = resp.Msg.Tenant.Ids[0].Key
	text, err := os.ReadFile(n.TokenFile())
	must(t, err)
	token, err := join.ParseToken(string(text))
	must(t, err)
	all["the token's secret"] = token.Secret[:]
	member, err := os.ReadFile(filepath.Join(n.folders[0], join.MemberFile))
	must(t, err)
	block, _ := pem.Decode(member)
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	must(t, err)
	all["the node's private key"], err = key.(*ecdsa.PrivateKey).Bytes()
	must(t, err)
	stable := netip.MustParseAddr("2001:db8:5ec:12e7:1:2:3:4")
	must(t, n.ns.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/eth0/stable_secret", []byte(stable.String()), 0)
	}))
	all["the device's stable_secret"] = stable.AsSlice()
	for name, secret := range all {
		if len(secret) < 16 {
			t.Fatalf("%s has %d bytes", name, len(secret))
		}
	}
	mark, err := ebpf.LoadPinnedMap(filepath.Join(n.bpffs, "maps", "pil_mark_v1"), &ebpf.LoadPinOptions{ReadOnly: true})
	must(t, err)
	defer mark.Close()
	if all["the programs' mark"], err = mark.LookupBytes(uint32(0)); err != nil || len(all["the programs' mark"]) != 4 {
		t.Fatalf("the programs' mark: %x, %v", all["the programs' mark"], err)
	}
	return all
}

type dumped struct {
	File   string
	Failed int
	Parts  []struct{ Part, Error string }
}

func (n *node) sysdump(ctx context.Context, t *testing.T, file string) (status int, d dumped, complaint string) {
	t.Helper()
	var out, errs bytes.Buffer
	args := []string{
		"sysdump", file, "-o", "json", "--state-dir", n.folders[0], "--bpffs", n.bpffs, "--agent-socket",
		n.AgentSocket(name),
		"--orchestrator-socket", filepath.Join(n.Folder(), "orchestrator", "run", "orchestrator.sock"), "--log",
		filepath.Join(n.Folder(), "log", lab.AgentProcess(name)+".log"),
	}
	cmd := exec.CommandContext(ctx, labtest.Binary(t), args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	status, ok := lab.ExitStatus(n.ns.Run(cmd))
	if !ok {
		t.Fatalf("sysdump did not run: %s", &errs)
	}
	if status == 0 {
		must(t, json.Unmarshal(out.Bytes(), &d))
	}
	return status, d, errs.String()
}

// unpack reads the files of an archive, by path in its folder.
func unpack(t *testing.T, file string) map[string][]byte {
	t.Helper()
	f, err := os.Open(file)
	must(t, err)
	defer f.Close()
	zip, err := gzip.NewReader(f)
	must(t, err)
	files := map[string][]byte{}
	for archive := tar.NewReader(zip); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		_, path, _ := strings.Cut(h.Name, "/")
		files[path], err = io.ReadAll(archive)
		must(t, err)
	}
}

func TestSysdump(t *testing.T) {
	n := newNode(t, false)
	ctx := labtest.Context(t)
	secrets := n.secrets(ctx, t)
	n.drop(ctx, t)
	b1, err := n.Container("b1")
	must(t, err)

	file := filepath.Join(t.TempDir(), "alive.tar.gz")
	status, d, complaint := n.sysdump(ctx, t, file)
	if status != 0 || d.Failed != 0 || len(d.Parts) < 25 || strings.Count(complaint, " ok\n") != len(d.Parts) {
		t.Errorf("got exit status %d, %+v\n%s", status, d, complaint)
	}
	alive := unpack(t, file)
	device, program := "pil1", "pil_container" // of b1
	if labtest.Device() == endpoint.Macvlan {
		device, program = "pilaster1", "pil_guard_out" // b1 has no device on the node
	}
	for part, says := range map[string]string{
		"agent/status.json": `"ready":true`, "agent/endpoints.json": b1.Address.String(),
		"agent/drops.json":  "dst-undecryptable",
		"agent/metrics.txt": "pilaster_agent_ready1", "agent/goroutines.txt": "daemon.run",
		"agent/log.txt":    "agentisready",
		"agent/state.json": b1.Plaintext.String(), "agent/certificates.json": name,
		"datapath/tables.json": b1.Plaintext.String(), "datapath/pins.json": "pil_locals_v1",
		"datapath/hooks.json": program,
		"network/links.txt":   device + "@", "network/routes.txt": "unreachable", "network/sysctls.json": "conf/" +
			device + `/forwarding":"1"`,
		"orchestrator/tenants.json": "blue", "orchestrator/nodes.json": name,
		"orchestrator/goroutines.txt": "orchestrator.",
		"preflight.json":              "privileges", "machine/uname.txt": "linux", "version.json": "go1.",
		"index.json": "agent/status.json",
	} {
		if !strings.Contains(plain(string(alive[part])), strings.ToLower(says)) {
			t.Errorf("%s lacks %q:\n%s", part, says, alive[part])
		}
	}

	for _, command := range [][]string{{"status"}, {"endpoint", "list"}} {
		out, err := n.Output(ctx, name, append([]string{labtest.Binary(t)}, append(command, "-o", "json")...)...)
		must(t, err)
		alive["pilaster "+strings.Join(command, " ")] = []byte(out)
	}
	log, err := os.ReadFile(filepath.Join(n.Folder(), "log", lab.AgentProcess(name)+".log"))
	must(t, err)
	alive["the whole log"] = log

	documented(t, alive["agent/metrics.txt"], alive["orchestrator/metrics.txt"])

	before, err := os.ReadFile(file)
	must(t, err)
	if status, _, complaint := n.sysdump(ctx, t, file); status != 1 ||
		!strings.Contains(complaint, "nothing was written") {
		t.Errorf("with an existing file: got exit status %d, %s", status, complaint)
	}
	if after, err := os.ReadFile(file); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the existing file was changed: %v", err)
	}

	must(t, n.Stop(ctx, lab.AgentProcess(name)))
	file = filepath.Join(t.TempDir(), "dead.tar.gz")
	status, d, complaint = n.sysdump(ctx, t, file)
	dead := unpack(t, file)
	var failed []string
	for _, p := range d.Parts {
		if p.Error != "" {
			failed = append(failed, p.Part)
			if !strings.HasPrefix(strings.TrimPrefix(p.Error, "unavailable: "),
				"no daemon listens on "+n.AgentSocket(name)) || !strings.Contains(complaint, p.Part) ||
				!bytes.Contains(dead["index.json"], []byte(p.Part)) {
				t.Errorf("%+v", p)
			}
		}
	}
	if want := []string{"agent/status.json", "agent/endpoints.json", "agent/drops.json", "agent/metrics.txt",
		"agent/goroutines.txt"}; status != 0 || !slices.Equal(failed, want) {
		t.Errorf("without an agent: got exit status %d, incomplete parts %q", status, failed)
	}
	for _, part := range []string{"agent/state.json", "datapath/tables.json"} {
		if !bytes.Contains(dead[part], []byte(b1.Address.String())) {
			t.Errorf("without an agent %s lacks %v:\n%s", part, b1.Address, dead[part])
		}
	}
	for _, l := range append(leaks(alive, secrets), leaks(dead, secrets)...) {
		t.Error(l)
	}
}

// documented checks that docs/reference/metrics.md has all metrics of agent and orchestrator and no others.
func documented(t *testing.T, pages ...[]byte) {
	t.Helper()
	guide, err := os.ReadFile("../../docs/reference/metrics.md")
	must(t, err)
	shown, says := map[string]bool{}, map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(pilaster_[a-z_]+)` \\| ([a-z]+)").FindAllSubmatch(guide, -1) {
		// internal/accelerate compares its own; the orchestrator has the others only with BGP peers.
		if !bytes.HasPrefix(m[1], []byte("pilaster_accelerate_")) &&
			!bytes.HasPrefix(m[1], []byte("pilaster_orchestrator_evpn_")) &&
			!bytes.HasPrefix(m[1], []byte("pilaster_orchestrator_bgp_")) {
			shown[fmt.Sprintf("%s %s", m[1], m[2])] = true
		}
	}
	for _, page := range pages {
		for _, m := range regexp.MustCompile("(?m)^# TYPE (pilaster_[a-z_]+ [a-z]+)$").FindAllSubmatch(page, -1) {
			says[string(m[1])] = true
		}
	}
	// These metrics have no lines yet: they have no value, or there are no policies.
	for _, later := range []string{
		"pilaster_orchestrator_streams_ended_total counter", "pilaster_policy_denied_packets_total counter",
		"pilaster_sessions gauge",
		"pilaster_sessions_capacity gauge", "pilaster_sessions_largest_endpoint gauge",
		"pilaster_sessions_largest_tenant gauge",
		"pilaster_sessions_total counter",
		"pilaster_offload_messages_total counter", "pilaster_offload_lost_frontends gauge",
		"pilaster_offload_probe_age_seconds gauge", "pilaster_packet_load gauge",
		"pilaster_egress_addresses gauge", "pilaster_egress_gateway_used gauge",
		"pilaster_egress_probe_age_seconds gauge",                                        // no tenant may leave
		"pilaster_service_flows_total counter", "pilaster_service_refused_total counter", // no services
		"pilaster_mapping_subscriptions gauge", "pilaster_mapping_misses_total counter", // no node pulls
	} {
		says[later] = says[later] || shown[later]
	}
	if len(says) < 15 || !maps.Equal(shown, says) {
		t.Errorf("docs/reference/metrics.md has\n%q, the daemons have\n%q", slices.Sorted(maps.Keys(shown)),
			slices.Sorted(maps.Keys(says)))
	}
}

// drop sends packets that must be dropped, and waits until the agent has counted them.
func (n *node) drop(ctx context.Context, t *testing.T) {
	t.Helper()
	b1, err := n.Namespace("b1")
	must(t, err)
	defer b1.Close()
	for {
		must(t, b1.Do(func() error {
			c, err := net.Dial("udp", "[fc00::1]:9")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("hello"))
			return err
		}))
		resp, err := n.Agent(name).RecentEvents(ctx, connect.NewRequest(&pilasterv1.RecentEventsRequest{}))
		must(t, err)
		if slices.ContainsFunc(resp.Msg.Events,
			func(e *pilasterv1.MonitorResponse) bool { return e.Reason == "dst-undecryptable" }) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
