package labtest

import (
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/modules"
	"pilaster.io/pilaster/internal/modules/nimitz"
)

// Switch returns the keys of a lab whose nodes have a switch; some may have another one. No switch means the default.
func Switch(kind string, nodes lab.Switches) modules.LabKeys {
	return modules.LabKeys{LabKeys: nimitz.LabKeys{Nimitz: kind, Switches: nodes}}
}
