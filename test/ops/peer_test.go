package ops_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/accelerate"
	"pilaster.io/pilaster/internal/bench"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// likeFlannel sets up what flannel.sh of the page sets up, without etcd and flanneld. Before it removes the network, it
// writes the status of node 1's accelerate daemon, if there is one, to $PEER_TEST.
const likeFlannel = `#!/bin/bash
set -eu
case $1 in
up)
    touch "$BENCH_DIR/pids"
    for i in 1 2; do
        node=BENCH_NODE_$i container=BENCH_CONTAINER_$i local=BENCH_ADDRESS4_$i
        other=$((3 - i)) remote=BENCH_ADDRESS4_$((3 - i))
        nsenter --net="${!node}" -- sysctl -qw net.ipv4.ip_forward=1
        nsenter --net="${!node}" -- ip -batch - <<END
link add flannel.1 address 02:fa:00:00:00:0$i mtu 1450 type vxlan id 1 local ${!local} dstport 8472 nolearning
addr add 10.244.$i.0/32 dev flannel.1
link set flannel.1 up
link add cni0 address 02:cb:00:00:00:0$i mtu 1450 type bridge
addr add 10.244.$i.1/24 dev cni0
link set cni0 up
link add container mtu 1450 type veth peer name eth0 mtu 1450 netns ${!container}
link set container master cni0 up
neigh add 10.244.$other.0 lladdr 02:fa:00:00:00:0$other dev flannel.1 nud permanent
route add 10.244.$other.0/24 via 10.244.$other.0 dev flannel.1 onlink
END
        nsenter --net="${!node}" -- bridge fdb add 02:fa:00:00:00:0$other dev flannel.1 dst "${!remote}"
        nsenter --net="${!container}" -- ip -batch - <<END
addr add 10.244.$i.2/24 dev eth0
link set eth0 up
route add default via 10.244.$i.1
END
    done
    echo 10.244.2.2
    ;;
down)
    socket=$BENCH_DIR/accelerate1.sock
    [ ! -e "$socket" ] || "$PILASTER" accelerate status --socket "$socket" -o json >"$PEER_TEST"
    xargs -r kill <"$BENCH_DIR/pids"
    ;;
esac
`

// TestPeerWithCache runs the script of docs/howto/benchmark-peer.md that starts accelerate daemons. Its figures are
// compared with those of the same network without the daemons, and its packets use the cache.
func TestPeerWithCache(t *testing.T) {
	page, err := os.ReadFile("../../docs/howto/benchmark-peer.md")
	if err != nil {
		t.Fatal(err)
	}
	script := regexp.MustCompile("(?s)```bash\n(#!/bin/bash\n# flannel-oncache.sh;.*?)```").FindSubmatch(page)
	if script == nil {
		t.Fatal("the page has no flannel-oncache.sh")
	}
	dir := t.TempDir()
	without, with := filepath.Join(dir, "flannel.sh"), filepath.Join(dir, "flannel-oncache.sh")
	status := filepath.Join(dir, "status.json")
	for file, text := range map[string]string{without: likeFlannel, with: string(script[1])} {
		if err := os.WriteFile(file, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	pilaster := labtest.Binary(t)
	c := exec.Command(pilaster, "bench", "oncache", "--smoke", "-o", "json", "--scenarios", "native,vxlan",
		"--metrics", "TCP_RR,MEMCACHED", "--peer", "flannel="+without, "--peer", "flannel-oncache="+with)
	c.Env = append(os.Environ(), "PILASTER="+pilaster, "PEER_TEST="+status)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &errs)
	}
	var r bench.Report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	var compared []string
	for _, x := range r.Beside {
		if x.Ratio.Median > 0 {
			compared = append(compared, x.Metric+" "+x.Scenario+" "+x.Against)
		}
	}
	want := "TCP_RR flannel vxlan, TCP_RR flannel-oncache flannel, " +
		"MEMCACHED flannel vxlan, MEMCACHED flannel-oncache flannel"
	if got := strings.Join(compared, ", "); got != want {
		t.Errorf("compared: %s; want %s", got, want)
	}
	var s accelerate.Status
	said, err := os.ReadFile(status)
	if err == nil {
		err = json.Unmarshal(said, &s)
	}
	if err != nil || !s.InUse || s.Egress.Hits < 100 || s.Ingress.Hits < 100 {
		t.Errorf("the peer's packets do not use the cache: %v: %s", err, said)
	}
}
