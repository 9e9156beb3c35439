// Command pilaster-cni is the CNI plugin: it passes what a container runtime wants on to the
// agent of this node.
package main

import (
	"os"

	"github.com/containernetworking/cni/pkg/skel"

	"pilaster.io/pilaster/internal/cni"
)

func main() {
	skel.PluginMainFuncs(cni.Funcs(os.Stdout), cni.Versions(), "Pilaster's CNI plugin: it asks the agent of this node; see https://www.cni.dev for how it is called")
}
