package cli

import (
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator"
)

// startRegion starts the orchestrator of a region. use makes later commands call this orchestrator; join adds an Edge
// Switch.
func startRegion(t *testing.T, name, base string) (use, join func()) {
	t.Helper()
	dir := t.TempDir()
	c := orchestrator.Config{
		DataDir: filepath.Join(dir, "data"),
		RunDir:  dir,
		Listen:  "[::1]:0",
		Region:  name,
		Log:     slog.New(slog.DiscardHandler),
	}
	c.Plan.Base = netip.MustParsePrefix(base)
	s, err := orchestrator.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return func() { t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", orchestrator.Socket(dir)) }, func() {
		joinNode(t, s, "e1",
			&pilasterv1.RegisterRequest{Edge: true, Gateway: true})
	}
}

func TestRegionCommands(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	west, westEdge := startRegion(t, "west", "fd70:696c:6100::/40")
	east, eastEdge := startRegion(t, "east", "fd70:696c:6200::/40")
	east()
	prints(t, "REGION        BASE PREFIX           EDGE   TENANTS\n"+
		"east (here)   fd70:696c:6200::/40   none   none\n",
		"region", "list")
	refused(t, ExitFailed, "no Edge Switch", "region", "export")
	eastEdge()
	for _, line := range []string{"other --cidr 10.8.0.0/16", "blue --cidr 10.1.0.0/16", "red --cidr 10.1.0.0/16"} {
		command(t, append([]string{"tenant", "create", "--network", "nimitz"}, strings.Fields(line)...)...)
	}
	command(t, "tenant", "create", "green") // on netpila: not exported
	prints(t, "region        east\n"+
		"base prefix   fd70:696c:6200::/40\n"+
		"edge          fd70:696c:6200:1::/64\n"+
		"tenant        blue    VNI 2   10.1.0.0/16\n"+
		"tenant        other   VNI 1   10.8.0.0/16\n"+
		"tenant        red     VNI 3   10.1.0.0/16\n",
		"region", "export", "-o", "text")
	export := command(t, "region", "export")
	if !strings.Contains(export.stdout, `"version": 2,`) {
		t.Errorf("export wrote %s, want version 2, which has creation times", export.stdout)
	}
	file := filepath.Join(t.TempDir(), "east.json")
	if err := os.WriteFile(file, []byte(export.stdout), 0o600); err != nil {
		t.Fatal(err)
	}

	west()
	command(t, "tenant", "create", "blue", "--network", "nimitz", "--cidr", "10.0.0.0/16")
	command(t, "tenant", "create", "red")
	refused(t, ExitFailed, "--edge", "region", "import", file)
	westEdge()
	broken := filepath.Join(t.TempDir(), "broken.json")
	for text, says := range map[string]string{
		"": "is not a file of `pilaster region export`; nothing was changed", "{}": "is not a file of",
		`{"version": 1, "nmae": "x"}`: "is not a file of",
		`{"version": 3}`:              "format version 3", `{"version": 1}`: "region name",
		strings.Replace(export.stdout, "10.8.0.0/16", "10.8.0.1/16", 1): "host bits set",
	} {
		if err := os.WriteFile(broken, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		refused(t, ExitUsage, says, "region", "import", broken)
	}
	refused(t, ExitUsage, "no such file", "region", "import", broken+"x")
	refused(t, ExitFailed, `exports no tenant "pink"`, "region", "import", file, "--tenant", "pink")
	if r := command(t, "region", "list"); strings.Contains(r.stdout, "east") {
		t.Errorf("region list shows a rejected region: %s", r.stdout)
	}

	if r := command(t, "region", "import", file); r.code != ExitDone ||
		r.stdout != "region        east\nbase prefix   fd70:696c:6200::/40\nedge          fd70:696c:6200:1::/64\n"+
			"tenant        blue    VNI 2   10.1.0.0/16   joined\ntenant        other   VNI 1   10.8.0.0/16   not in "+
			"this region\ntenant        red     VNI 3   10.1.0.0/16   not joined: on network netpila here\n" {
		t.Errorf("region import: %+v, want tenants blue (joined), other and red (not joined)", r)
	}
	if r := command(t, "region", "list"); !strings.Contains(
		r.stdout,
		"blue, other (not in this region), red (not joined: on network netpila here)\n",
	) {
		t.Errorf("region list: %s, want the state of each tenant", r.stdout)
	}
	if v := ask[regionsView](t, "region", "list"); v.Regions[0].Tenants[0].Here != "joined" ||
		v.Own.Tenants[0].Here != "" {
		t.Errorf("region list: %+v, want blue joined, and no state of this region's tenants", v)
	}
	v := ask[tenantView](t, "tenant", "get", "blue")
	if want := []elsewhereView{{"east", []string{"10.1.0.0/16"}, "fd70:696c:6100:1::/64", "fd70:696c:6200:1::/64",
		2}}; !reflect.DeepEqual(
		v.Regions,
		want,
	) {
		t.Errorf("tenant get blue: regions %+v, want %+v", v.Regions, want)
	}
	if r := command(t, "tenant", "get", "blue"); !strings.Contains(
		r.stdout,
		"10.1.0.0/16, VNI 2, by Edge Switch fd70:696c:6200:1::/64",
	) {
		t.Errorf("tenant get blue: %s, want its CIDR in the other region", r.stdout)
	}
	if !ask[nodeView](t, "node", "get", "e1").Edge {
		t.Error("node get does not show that e1 is the Edge Switch")
	}
	refused(t, ExitFailed, "e1 is the Edge Switch", "node", "delete", "e1")
	if code, stdout, stderr := run(t, export.stdout, "region", "import", "-", "--tenant", "blue", "-o",
		"json"); code != ExitDone ||
		strings.Contains(stdout, `"name": "red"`) ||
		!strings.Contains(stdout, `"here": "joined"`) {
		t.Errorf("import of blue from standard input: exit %d, stdout %s, stderr %s", code, stdout, stderr)
	}
	if r := command(t, "region", "import", file); r.code != ExitDone || strings.Contains(r.stdout, "VNI 3") ||
		!strings.Contains(r.stdout, "left out      other, red\n") {
		t.Errorf("imported again: %+v, want the choice of the first import and 2 tenants left out", r)
	}
	refused(t, ExitUsage, "all", "region", "import", file, "--all", "--tenant", "blue")
	if v := ask[regionView](t, "region", "import", file, "--all"); len(v.Tenants) != 3 || len(v.LeftOut) > 0 {
		t.Errorf("import --all: %+v, want 3 tenants", v)
	}
	if v := ask[regionView](t, "region", "import", file, "--tenant", "blue"); len(v.LeftOut) != 2 {
		t.Errorf("import --tenant blue: %+v, want 2 tenants left out", v)
	}
	if v := ask[regionsView](t, "region", "list"); v.Own.Name != "west" || v.Own.Edge != "fd70:696c:6100:1::/64" ||
		len(v.Regions) != 1 ||
		len(v.Regions[0].Tenants) != 1 {
		t.Errorf("region list: %+v, want west and one region with one tenant", v)
	}
	for line, says := range map[string]string{"region delete": "east\n", "region import x --tenant": "blue\nred\n"} {
		if r := command(t, append(append([]string{"__complete"}, strings.Fields(line)...), "")...); !strings.HasPrefix(
			r.stdout,
			says,
		) {
			t.Errorf("%s <TAB>: %q, want prefix %q", line, r.stdout, says)
		}
	}
	testRestoredRegions(t, filepath.Join(filepath.Dir(os.Getenv("PILASTER_ORCHESTRATOR_SOCKET")), "data"))
	command(t, "tenant", "delete", "blue")
	command(t, "tenant", "create", "blue", "--network", "nimitz", "--cidr", "10.0.0.0/16")
	if r := command(t, "region", "list"); !strings.Contains(
		r.stdout,
		"blue (not joined: created again here since the import)\n",
	) {
		t.Errorf("region list: %s, want blue not joined", r.stdout)
	}
	refused(
		t,
		ExitFailed,
		"tenant blue was deleted and created again here since region east was imported",
		"region",
		"import",
		file,
	)
	if r := command(t, "region", "import", file, "--tenant", "blue"); r.code != ExitDone ||
		!strings.Contains(r.stdout, "10.1.0.0/16   joined\n") {
		t.Errorf("import --tenant blue: %+v, want blue joined", r)
	}
	if r := command(t, "region", "delete", "east"); !strings.HasPrefix(
		r.stdout,
		"region east deleted\nEdge Switch e1 is disconnected and was not notified: it continues to forward until",
	) {
		t.Errorf("region delete: %+v, want a note about the disconnected Edge Switch", r)
	}
	command(t, "region", "import", file, "--tenant", "blue")
	if r := command(t, "node", "delete", "e1", "--force"); !strings.HasPrefix(
		r.stdout,
		"node e1 deleted\nIt was this region's Edge Switch",
	) ||
		!strings.Contains(r.stdout, "powered off") {
		t.Errorf("node delete: %+v, want a note about the Edge Switch", r)
	}
	if r := command(t, "region", "list"); !strings.Contains(
		r.stdout,
		"blue (not joined: no Edge Switch here)\n",
	) {
		t.Errorf("region list: %s, want blue not joined", r.stdout)
	}
	prints(t, "region east deleted\n", "region", "delete", "east")
	refused(t, ExitFailed, `no other region "east"`, "region", "delete", "east")
	refused(t, ExitUsage, "--region: region name \"West\"", "orchestrator", "--region", "West")
	t.Setenv("PILASTER_ORCHESTRATOR_SOCKET", "/nonexistent")
	refused(t, ExitUnreachable, "/nonexistent", "region", "list")
}

// testRestoredRegions checks that a restore prints the connected regions and the Edge Switch.
func testRestoredRegions(t *testing.T, data string) {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "backup")
	command(t, "orchestrator", "backup", file, "--data-dir", data)
	r := command(t, "orchestrator", "restore", file, "--data-dir", filepath.Join(dir, "text"))
	for _, says := range []string{"Connected regions are those of the backup (east)", "Node e1 is the Edge Switch",
		"node delete e1 --force"} {
		if !strings.Contains(r.stdout, says) {
			t.Errorf("restore: %+v, want %q", r, says)
		}
	}
	if v := ask[backupView](t, "orchestrator", "restore", file, "--data-dir", filepath.Join(dir, "json")); len(
		v.Regions,
	) != 1 ||
		v.Regions[0] != "east" ||
		v.Edge != "e1" {
		t.Errorf("restore: %+v, want region east and Edge Switch e1", v)
	}
}
