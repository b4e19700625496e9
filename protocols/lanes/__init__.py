"""Long bodies at the speed of the link: connections that one thread sends and receives on."""
