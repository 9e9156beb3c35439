package accelerate

import (
	"log/slog"
	"strings"
	"time"

	"pilaster.io/pilaster/internal/accelerate/overlay"
)

// Options configure the daemon.
type Options struct {
	Uplink, Overlay string
	Containers      overlay.Containers
	MarkMask        uint32
	Socket          string // the record of changed settings is beside it
	MetricsListen   string // "host:port"; empty means the unix socket only
	Log             *slog.Logger
}

// MaxValidity is how long an entry of the cache is valid after the overlay last let a packet of the flow through. So
// changes without an event take effect within this time.
const MaxValidity = 10 * time.Second

// lease is how often the daemon renews its lease. It is void after three times as long.
const lease = time.Second

// recordOf returns the file with the settings that the daemon of a socket changed. It must be on a tmpfs, as the socket
// is: a reboot restores the settings too.
func recordOf(socket string) string { return strings.TrimSuffix(socket, ".sock") + ".json" }
